"""The metrics are pycocotools' own, to 1e-12, ties, crowds and empty images included."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluation.judge import Row, detections, pycocotools_figures, read_truth, write_annotations
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl.data.annotations import (
    Conversion,
    LabeledBox,
    LabeledImage,
    SplitFiles,
    from_images,
)
from ssdctl.data.check import check
from ssdctl.data.formats import coco
from ssdctl.data.image_files import FingerprintColumns
from ssdctl.data.index import Made, Metadata, index_path, write_index
from ssdctl.errors import DataError
from ssdctl.evaluation.coco_ap import read_detections, read_ground_truth, run_scoring
from ssdctl.evaluation.matches import match_objects
from ssdctl.evaluation.resample import METRICS, resample


def annotations(folder: Path, objects: list[dict[str, Any]]) -> Path:
    return write_annotations(folder, objects, {i: f"class {i}" for i in (2, 5, 11)})


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[Row]]:
    """Use few places and few scores, so that overlaps and ties are common."""
    place = st.integers(0, 6).map(lambda n: n * 12.0)
    edge = st.sampled_from([0.0, 12.0, 24.0, 72.0, 180.0, 300.0])  # boxes leave their image, too
    side = st.sampled_from([5.0, 20.0, 40.0, 100.0])
    box = st.tuples(place, place, side, side).map(list)
    image, category = st.integers(0, 3), st.sampled_from([2, 5, 11])
    truth = st.fixed_dictionaries(
        {
            "image_id": image,
            "bbox": st.one_of(box, st.tuples(edge, edge, side, side).map(list)),
            "area": st.sampled_from([100.0, 1500.0, 20000.0]),
            "category_id": category,
            "iscrowd": st.sampled_from([0, 0, 0, 1]),
        }
    )
    detection = st.tuples(image, category, box, st.sampled_from([0.2, 0.5, 0.5, 0.9]))
    return draw(st.lists(truth, max_size=20)), draw(st.lists(detection, max_size=40))


Case = tuple[list[dict[str, Any]], list[Row]]
# What CVAT, Roboflow, Label Studio and FiftyOne write into fields that scoring does not use.
IGNORED = (None, 0, "", "2026", 1.2, [], {}, [[]], [[{}]], [1, 2, 3, 4, 5, 6], {"counts": "abc"})
FIELDS = {
    "images": ("license", "date_captured", "coco_url", "extra"),
    "annotations": ("segmentation", "attributes", "score", "ignore", "keypoints"),
    "categories": ("keypoints", "color"),
}
NO_BOX: list[dict[str, Any]] = [{"bbox": []}, {"bbox": None}, {}]
NO_AREA: list[dict[str, Any]] = [{"area": None}, {"area": "large"}, {"area": 10**400}, {}]


def as_tools_write(clean: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the same truth in another spelling; areas that are left out are those of the boxes."""
    content = copy.deepcopy(clean)
    content |= {name: rng.choice(IGNORED) for name in ("info", "licenses", "videos")}
    for table, names in FIELDS.items():
        for entry in content[table]:
            entry |= {name: rng.choice(IGNORED) for name in names if rng.random() < 0.7}
            entry["id"] = rng.choice([int, float])(entry["id"])
    shift = rng.choice([-1, -9, 2**60])  # of the annotations' ids, which count from 0 or below
    for entry, same in zip(content["annotations"], clean["annotations"], strict=True):
        entry["id"] = int(entry["id"]) + shift
        for name in ("image_id", "category_id"):
            entry[name] = rng.choice([int, float])(entry[name])
        crowd = entry.pop("iscrowd")
        entry |= rng.choice([{"iscrowd": kind(crowd)} for kind in (int, bool, float)]
                            + [{}, {"iscrowd": None}] * (not crowd))  # fmt: skip
        if rng.random() < 0.2:
            same["area"] = float(same["bbox"][2] * same["bbox"][3])
            del entry["area"]
            entry |= rng.choice(NO_AREA)
    for number, box in enumerate(rng.sample(NO_BOX, 2)):
        entry = {"id": 10**6 + number, "image_id": 1, "category_id": 2, "area": 0, "iscrowd": 0}
        content["annotations"].append({**entry, **box})
    for image in content["images"]:
        image["width"] = rng.choice([300, 300.0])
    for category in content["categories"]:
        category["supercategory"] = "project"
    if rng.random() < 0.5:  # Roboflow's, without objects
        project = {"id": 0, "name": "project", "supercategory": "none"}
        content["categories"].insert(0, project)
    rng.shuffle(content["images"])
    return content


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_equal_to_pycocotools(
    tmp_path_factory: pytest.TempPathFactory, case: Case, rng: random.Random
) -> None:
    """Score by the file, as tools write it, and by its index; the judge reads a clean file."""
    truth, rows = case
    path = annotations(tmp_path_factory.mktemp("case"), truth)
    clean = json.loads(path.read_text())
    path.write_text(json.dumps(as_tools_write(clean, rng)))
    found = detections(rows)
    for image_ids in (None, np.array([0, 2])):
        expected = pycocotools_figures(clean, found, image_ids)
        for truth_read in (read_truth(path), read_ground_truth(index_of(path))):
            scoring = run_scoring(truth_read, found, image_ids=image_ids, verify=True)
            actual = list(scoring.metrics.values())
            np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
            assert {c.name for c in scoring.per_class} == {"class 2", "class 5", "class 11"}
            estimates = resample(scoring, match_objects(scoring), num_draws=1).estimates[0]
            counted = np.nan_to_num(estimates, nan=-1)
            np.testing.assert_allclose(counted, expected[: len(METRICS)], rtol=0, atol=1e-12)


def index_of(path: Path) -> Path:
    """Write the index of an annotation file, without its images."""
    part = coco.read_files({"val": SplitFiles([path.parent], path)})["val"]
    count = len(part.file_names)
    usable, versions = np.ones(count, np.bool_), FingerprintColumns(*np.zeros((3, count), np.int64))
    made = Made("coco", Conversion(), "", ["val"], "", "")
    metadata = Metadata(
        format=5,
        packed=False,
        shards=[],
        key="",
        classes=part.classes,
        images=".",
        origin=str(path),
        made=made,
        duplicates=[],
    )
    index, checked = index_path(path.parent, "val"), check(part)
    with index.open("wb") as file:
        write_index(file, part, checked.objects, usable, checked.is_empty, versions, metadata)
    return index


def test_detections_of_unlisted_classes_are_ignored_and_of_images_refused(tmp_path: Path) -> None:
    path = annotations(tmp_path, [{"image_id": 0, "bbox": [1, 1, 5, 5], "category_id": 2}])
    listed = [(0, 2, [1.0, 1, 5, 5], 0.5)]
    unlisted = [(0, 99, [1.0, 1, 5, 5], 0.9), (1, -1, [1.0, 1, 5, 5], 0.9)]
    truth = read_truth(path)
    scores = run_scoring(truth, detections([*listed, *unlisted]), verify=True)
    expected = run_scoring(truth, detections(listed))
    assert (scores.metrics, scores.per_class) == (expected.metrics, expected.per_class)
    with pytest.raises(DataError, match=r"\b1 images"):
        run_scoring(truth, detections([(99, 2, [1.0, 1, 1, 1], 0.5)]))


def test_objects_of_unlisted_categories_are_left_out_up_to_5_percent(tmp_path: Path) -> None:
    box = {"image_id": 0, "bbox": [1, 1, 5, 5]}
    listed, unlisted = [{**box, "category_id": 2}] * 19, {**box, "category_id": 99}
    assert len(read_truth(annotations(tmp_path, [*listed, unlisted])).boxes) == 19
    with pytest.raises(DataError, match=r"\b19 \(category 99\)"):
        read_truth(annotations(tmp_path, [*listed[1:], unlisted]))


def test_results_file_round_trip(tmp_path: Path) -> None:
    before = detections([(139, 5, [1.5, 2, 3, 4], 0.25), (0, 2, [0.1, 0.2, 0.3, 0.4], 1 / 3)])
    path = tmp_path / "detections.json"
    text = json.dumps(before.to_coco())
    for content in (text, text.replace(": 139,", ": 139.0,")):  # ids may be whole floats
        path.write_text(content)
        after = read_detections(path)
        assert all(np.array_equal(*pair) for pair in zip(after, before, strict=True))


def test_names_of_images_count_more_than_ids(tmp_path: Path) -> None:
    """Of a whole path, or of its last part; other programs have text as ids."""
    boxes = [LabeledBox("a", 0, 0, 5, 5)]
    names = ("x/1.jpg", "x/10.jpg", "x/2.jpg", "y/2.jpg")
    images = [LabeledImage(name, 9, 9, boxes) for name in names]
    truth = from_images({"train": images}, None, tmp_path, tmp_path, [])["train"]
    path, row = tmp_path / "d.json", {"category_id": 1, "bbox": [0, 0, 5, 5], "score": 1}
    given = {"x/2.jpg": 3, "10.jpg": 2, "val/1.jpg": 1, "y/2.jpg": 4}
    path.write_text(json.dumps([{**row, "image_id": n[:2], "file_name": n} for n in given]))
    assert read_detections(path, truth).image_ids.tolist() == [*given.values()]
    for name in ("2.jpg", "3.jpg", "val/1.jpg"):  # two have it, none, or it is named twice
        rows = [{**row, "image_id": 1, "file_name": n} for n in ("1.jpg", name)]
        path.write_text(json.dumps(rows))
        with pytest.raises(DataError, match=rf"images? .*{name}"):
            read_detections(path, truth, has_ids=False)
    path.write_text(json.dumps([{**row, "image_id": 2, "file_name": "frame"}]))  # none of them
    assert read_detections(path, truth, has_ids=False).image_ids.tolist() == [2]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '[{"image_id": 1}]',
        '[{"image_id": 1.5, "category_id": 1, "bbox": [1, 1, 2, 2], "score": 1}]',
        '[{"image_id": 9223372036854775808, "category_id": 1, "bbox": [1, 1, 2, 2], "score": 1}]',
        '[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 1e999], "score": 1}]',
        '[{"image_id": 1, "category_id": 1, "bbox": [1, 1, 2, 2], "score": "nan"}]',
        '[{"\xe9": 1}]',  # Latin-1
    ],
)
def test_what_is_not_a_results_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "detections.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match="results format"):
        read_detections(path)
