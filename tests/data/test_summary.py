"""What prepare says about the images and boxes of each split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import Cli
from data.formats import exports
from helpers import train_command
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ssdctl.boxes import box_cxcywh_to_ltrb, default_boxes_cxcywh, pairwise_iou
from ssdctl.data.default_boxes import can_match


def prepared(cli: Cli, data: Path) -> tuple[dict[str, Any], str]:
    """The reports of `prepare --json` by split, and what it says."""
    result = cli("prepare", "--data", data, "--no-pack", "--json").expect(0)
    return {report["split"]: report for report in json.loads(result.out)["splits"]}, result.err


@given(st.integers(0, 10_000))
def test_objects_match_by_the_networks_own_default_boxes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centers, sizes = rng.random((50, 2)), np.exp(rng.uniform(-4.6, 0, (50, 2)))
    edges = np.concatenate([centers - sizes / 2, centers + sizes / 2], axis=1)
    boxes = edges.clip(0, 1).astype(np.float32)
    iou = pairwise_iou(torch.from_numpy(boxes), box_cxcywh_to_ltrb(default_boxes_cxcywh()))
    best = iou.amax(dim=1).numpy()
    assert (can_match(boxes) == (best >= 0.5))[abs(best - 0.5) > 1e-5].all()


def test_many_images_without_objects_may_not_be_labeled_yet(dataset: Path, cli: Cli) -> None:
    with exports.edited(dataset / "annotations/instances_train2017.json") as document:
        kept = [image["id"] for image in document["images"][::2]]
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] in kept]
    (warning,) = prepared(cli, dataset)[0]["train"]["warnings"]
    assert warning.startswith("13 of 24 images have no objects")


def test_small_objects_are_reported(dataset: Path, cli: Cli) -> None:
    with exports.edited(dataset / "annotations/instances_train2017.json") as document:
        for annotation in document["annotations"][::2]:
            annotation["bbox"][2:] = [6, 6]
    reports, _ = prepared(cli, dataset)
    sizes = reports["train"]["object_sizes"]
    assert 0.5 <= sizes["unmatched_share"] < 0.6
    (warning,) = reports["train"]["warnings"]
    assert f"{sizes['unmatched_share']:.0%}" in warning
    assert not any("default box" in warning for warning in reports["val"]["warnings"])


def test_no_label_file_is_not_an_empty_one(tmp_path: Path, cli: Cli) -> None:
    exports.roboflow_yolo(tmp_path)
    first, second, *_ = sorted((tmp_path / "train/labels").iterdir())
    first.unlink()
    second.write_text("")
    findings = prepared(cli, tmp_path)[0]["train"]["findings"]
    kinds = {Path(f["detail"]).stem: f["kind"] for f in findings}
    assert kinds[first.stem] == "no label file"
    assert kinds[second.stem].startswith("no objects")


def test_other_boxes_of_the_same_image_are_named(tmp_path: Path, cli: Cli) -> None:
    for folder, size in (("train", 0.5), ("train/old", 0.4), ("train/same", 0.5)):
        exports.tree(tmp_path, {f"{folder}/a.png": None})
        exports.tree(tmp_path, {f"{folder}/a.txt": f"0 0.5 0.5 {size} 0.5\n"})
    exports.tree(tmp_path, {"classes.txt": "bolt"})
    (warning,) = prepared(cli, tmp_path)[0]["train"]["warnings"]
    assert warning.endswith("but other boxes: train/old/a.png (train/a.png)")


def test_commands_say_that_images_were_trained_on(dataset: Path, cli: Cli, tmp_path: Path) -> None:
    """`val` of a dataset.toml is `train`."""
    table = 'images = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
    (dataset / "dataset.toml").write_text(f"[train]\n{table}[val]\n{table}")
    run = tmp_path / "run"
    trained = cli(*train_command(dataset, run, "--steps", 1)).expect(0)
    planned = cli("train", "--data", dataset, "--dry-run")
    evaluated = cli("evaluate", run, "--report", tmp_path / "report").expect(0)
    assert cli("report", run).code == 0
    pages = [(tmp_path / name / "report.html").read_text() for name in ("run", "report")]
    found = [{"image_id": 4, "category_id": 1, "bbox": [1, 1, 9, 9], "score": 0.5}]
    (tmp_path / "found.json").write_text(json.dumps(found))
    scored = cli("evaluate", tmp_path / "found.json", "--data", dataset)
    for text in (trained.err, planned.err, evaluated.err, scored.err, *pages):
        assert "24 of 24 images of val are also in train" in text


def test_audit_finds_an_image_that_was_encoded_again(dataset: Path, cli: Cli) -> None:
    with exports.edited(dataset / "annotations/instances_train2017.json") as document:
        first = document["images"][3]
    with exports.edited(dataset / "annotations/instances_val2017.json") as document:
        other = document["images"][2]
        other |= {side: first[side] // 2 for side in ("width", "height")}
        document["annotations"] = [
            a | {"bbox": [1, 1, 30, 30]} if a["image_id"] == other["id"] else a
            for a in document["annotations"]
        ]
    with Image.open(dataset / "train2017" / first["file_name"]) as image:
        image.resize((other["width"], other["height"])).save(
            dataset / "val2017" / other["file_name"], quality=70
        )
    result = cli("prepare", "--data", dataset, "--audit", "--json").expect(0)
    _, val = json.loads(result.out)["splits"]
    (near,) = val["near_duplicates"]
    assert near["examples"] == [[other["file_name"], first["file_name"]]]
    assert not val["duplicates"]
    assert "1 of 9 images of val look like images in train" in result.err
