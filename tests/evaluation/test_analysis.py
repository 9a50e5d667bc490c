"""The error analysis detects deliberate errors by type; labels that look wrong are listed first."""

from pathlib import Path

import numpy as np
import pytest
from evaluation.judge import Row, detections, image_counts, read_truth, write_annotations
from evaluation.test_resample import drawn_split
from numpy.typing import NDArray

from ssdctl.benchmark.evaluate import make_split
from ssdctl.data.annotations import Annotations, ClassName
from ssdctl.data.coco_json import document_of
from ssdctl.evaluation.analysis import (
    ERRORS,
    NUM_SAMPLES,
    best_threshold,
    choose_samples,
    diagnosis,
    score,
)
from ssdctl.evaluation.coco_ap import Detections, run_scoring
from ssdctl.evaluation.suspects import find_suspects
from ssdctl.runs.evaluation import SHOWN_SCORE, Evaluation, EvaluationInfo

BOX = [20.0, 20.0, 100.0, 100.0]
NUM_IMAGES = 4
RIGHT: list[Row] = [(i, 2, BOX, 0.9) for i in range(NUM_IMAGES)]


def evaluation(
    tmp_path: Path,
    rows: list[Row],
    *others: dict[str, object],
    image_ids: NDArray[np.int64] | None = None,
) -> Evaluation:
    """Evaluate detections on images with one object of category 2 each, and others."""
    truth = [{"image_id": i, "category_id": 2, "bbox": BOX} for i in range(NUM_IMAGES)]
    truth += others
    path = write_annotations(tmp_path, truth, {2: "cat", 7: "dog"})
    about = EvaluationInfo(source="x.json", data=".", store=".", split="val")
    return score(read_truth(path), detections(rows), about, image_ids)


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    truth = [{"image_id": i, "category_id": c, "bbox": BOX} for i, c in ((0, 2), (1, 7))]
    truth_file = read_truth(write_annotations(tmp_path, truth, {2: "cat", 7: "cat"}))
    about = EvaluationInfo(source="x.json", data=".", store=".", split="val")
    found = score(truth_file, detections([(0, 2, BOX, 0.56), (1, 7, BOX, 0.5)]), about)
    classes = [ClassName(2, "cat"), ClassName(7, "cat")]
    assert found.thresholds(classes) == [c.best_score for c in found.per_class] == [0.5599, 0.4999]
    assert len({c.name for c in found.per_class}) == 2


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("Cls", [(0, 7, BOX, 0.9), *RIGHT[1:]]),
        ("Loc", [(0, 2, [20.0, 20, 100, 35], 0.9), *RIGHT[1:]]),
        ("Both", [(0, 7, [20.0, 20, 100, 35], 0.9), *RIGHT[1:]]),
        ("Dupe", [*RIGHT, (0, 2, [22.0, 20, 100, 100], 0.8)]),
        ("Bkg", [*RIGHT, (0, 2, [200.0, 200, 50, 50], 0.95)]),
        ("Miss", RIGHT[1:]),
    ],
)
def test_each_kind_of_error_is_named(tmp_path: Path, kind: str, rows: list[Row]) -> None:
    result = evaluation(tmp_path, rows)
    errors = {e.kind: e for e in result.errors}
    assert errors[kind].count == 1
    assert not any(e.count for k, e in errors.items() if k not in (kind, "Miss"))
    if kind not in ("Both", "Dupe"):  # those do not change the AP here
        assert errors[kind].delta_ap > 0.01
        sentence = diagnosis(result)
        assert sentence.startswith(ERRORS[kind][2])
        assert f"+{errors[kind].delta_ap:.3f}" in sentence
        assert ("cat" in sentence and "dog" in sentence) == (kind == "Cls")


def test_perfect_detections_have_no_errors(tmp_path: Path) -> None:
    result, nothing = (evaluation(tmp_path, rows) for rows in (RIGHT, []))
    sentences = {diagnosis(result), diagnosis(nothing)}
    assert len(sentences) == 2
    assert not any(text in s for s in sentences for _, _, text in ERRORS.values())
    assert all(e.count == 0 and e.delta_ap == 0 for e in result.errors)
    cat, dog = result.per_class
    assert (cat.objects, cat.AP, cat.best_f1, cat.best_score) == (4, pytest.approx(1), 1.0, 0.8999)
    assert cat.precision == pytest.approx([1.0] * 101)
    assert (dog.objects, dog.AP, dog.best_f1, dog.precision) == (0, -1, -1, [])
    assert result.curves["0.50"] == pytest.approx([1.0] * 101)
    assert cat.intervals["AP"] == (0.3976, 1)  # 4 hits in 4 trials (Clopper and Pearson)
    absent = evaluation(tmp_path, RIGHT, {"image_id": 0, "category_id": 7, "bbox": [9, 9, 9, 9]})
    assert "missed objects would gain most: +0.500" in diagnosis(absent)  # as tidecv 1.0.1
    swapped = evaluation(tmp_path, [(image, 7, box, s) for image, _, box, s in RIGHT])
    assert diagnosis(swapped).startswith(ERRORS["Cls"][2])


def test_calibration_counts_true_positives(tmp_path: Path) -> None:
    far = [200.0, 200.0, 50.0, 50.0]
    rows: list[Row] = [(0, 2, BOX, 0.75), (1, 2, far, 0.75), (2, 2, far, 0.75), (3, 2, far, 0.75)]
    result = evaluation(tmp_path, rows)
    [used] = [b for b in result.calibration if b.count]
    assert (used.count, used.mean_score, used.fraction_right) == (4, 0.75, 0.25)
    assert result.calibration_error == pytest.approx(0.5)


@pytest.mark.parametrize("score", [-0.5, 1.5, 1e300])
def test_scores_that_are_no_probabilities_have_no_calibration(tmp_path: Path, score: float) -> None:
    result = evaluation(tmp_path, [(0, 2, BOX, score), *RIGHT[1:]])
    assert result.calibration_error is None
    assert result.calibration == result.suspects == []
    assert result.metrics["AP"] == pytest.approx(1)


def test_confusions_and_samples(tmp_path: Path) -> None:
    rows = [(0, 7, BOX, 0.9), (1, 7, BOX, 0.2), (1, 7, BOX, 0.01), *RIGHT[2:]]
    result = evaluation(tmp_path, rows)
    assert result.as_json()["confusions"] == [{"truth": "cat", "found": "dog", "count": 1}]
    first, second = result.samples[:2]
    assert (first.image_id, first.file_name) == (0, "0.jpg")
    assert [(t.category_id, list(t.box)) for t in first.truth] == [(2, BOX)]
    assert [(f.category_id, f.score) for f in first.found] == [(7, 0.9)]
    assert [f.score for f in second.found] == [0.2]  # the report's threshold can be lowered to 0.05
    cat, dog, background = result.confusion  # detections scoring 0.3 or more
    assert (cat, dog, background) == ([2, 1, 1], [0, 0, 0], [0, 0, 0])


def test_what_scoring_ignores_is_no_error(tmp_path: Path) -> None:
    """Detections in a crowd, of an unlisted category, and on an image that is not scored."""
    crowd = {"image_id": 0, "category_id": 2, "bbox": [150.0, 150, 100, 100], "iscrowd": 1}
    inside: list[Row] = [(0, 2, [155.0 + 40 * n, 155, 30, 30], 0.95) for n in range(2)]
    result = evaluation(tmp_path, [*RIGHT, *inside], crowd)
    assert result.confusion == [[4, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert [c.objects for c in result.per_class] == [4, 0]
    dog: list[Row] = [(0, 7, [155.0, 155, 30, 30], 0.95)]  # a crowd of cats
    assert evaluation(tmp_path, [*RIGHT, *dog], crowd).confusion[2] == [0, 1, 0]
    unlisted: list[Row] = [(0, 5, [155.0, 155, 30, 30], 0.95)]
    result = evaluation(tmp_path, [*RIGHT, *unlisted], image_ids=np.arange(2))
    assert (result.about.images, result.about.detections) == (2, 2)
    assert [[f.category_id for f in s.found] for s in result.samples] == [[2], [2]]


def test_f1_over_the_threshold(tmp_path: Path) -> None:
    """Two of four objects are found with 0.8, then one false detection and the others follow."""
    far = [200.0, 200.0, 50.0, 50.0]
    scores = (0.8, 0.8, 0.4, 0.4)
    rows = [(n, 2, BOX, s) for n, s in enumerate(scores)] + [(0, 2, far, 0.6), (1, 2, far, 0.4)]
    rows.append((2, 2, far, 0.1))
    result = evaluation(tmp_path, rows)
    cat, dog = result.per_class
    assert (len(cat.f1), dog.f1) == (101, [])
    expected = {0: 8 / 11, 10: 8 / 10, 39: 8 / 10, 40: 4 / 7, 59: 4 / 7, 60: 4 / 6, 79: 4 / 6}
    assert {n: cat.f1[n] for n in expected} == pytest.approx(expected, abs=1e-4)
    assert cat.f1[80] == cat.f1[100] == 0
    assert best_threshold(result) == (0.25, 0.8)
    assert best_threshold(evaluation(tmp_path, RIGHT)) == (0.45, 1.0)
    logits = evaluation(tmp_path, [(*row[:3], row[3] - 3) for row in rows]).per_class[0]
    assert (logits.best_f1, logits.best_score, logits.f1) == (0.8, pytest.approx(-2.6), [])


def test_a_confusion_matrix_has_all_detections(tmp_path: Path) -> None:
    boxes = [[25.0 * x, 25.0 * y, 20, 20] for x in range(11) for y in range(11)]
    labels = [2, 7] * 61
    objects = [
        {"image_id": 0, "category_id": c, "bbox": b} for c, b in zip(labels, boxes, strict=False)
    ]
    found: list[Row] = [(0, o["category_id"], o["bbox"], 0.9) for o in objects]  # type: ignore[misc]
    truth = read_truth(write_annotations(tmp_path, objects, {2: "cat", 7: "dog"}))
    about = EvaluationInfo(source="x.json", data=".", store=".", split="val")
    assert score(truth, detections(found), about).confusion == [[61, 0, 0], [0, 60, 0], [0, 0, 0]]


def test_the_worst_images_are_pycocotools() -> None:
    truth, found = make_split(num_images=300, num_boxes=2500, num_detections=20_000)
    assert truth.is_crowd.any()
    is_shown = found.scores >= SHOWN_SCORE
    shown = Detections(*(column[is_shown] for column in found))
    counts = image_counts(document_of(truth), shown)

    def badness(image_id: int) -> tuple[float, int, int]:
        hits, errors = counts[image_id]
        return 2 * hits / (2 * hits + errors) if errors else 1.0, -errors, image_id

    worst = sorted(counts, key=badness)[:NUM_SAMPLES]
    scoring = run_scoring(truth, found)
    samples = choose_samples(scoring, found)
    assert [s.image_id for s in samples if s.is_worst] == worst
    others = [s.image_id for s in samples if not s.is_worst]
    assert len(set(others) - set(worst)) == NUM_SAMPLES
    assert choose_samples(scoring, found) == samples
    some = np.arange(0, 300, 20)
    few = choose_samples(run_scoring(truth, found, image_ids=some), found)
    assert sorted(s.image_id for s in few) == some.tolist()


def damaged(truth: Annotations, count: int) -> tuple[Annotations, dict[tuple[int, float], str]]:
    """Change the classes of some objects, remove others; return the place of each damage."""
    chosen = np.random.default_rng(0).choice(len(truth.boxes), 2 * count, replace=False)
    labels, is_kept = truth.labels.copy(), np.ones(len(truth.boxes), np.bool_)
    labels[chosen[:count]] = 3 - labels[chosen[:count]]
    is_kept[chosen[count:]] = False
    kinds = {
        (int(truth.rows[row]), float(truth.boxes[row, 0])): "class" if n < count else "no box"
        for n, row in enumerate(chosen)
    }
    return truth._replace(labels=labels).with_objects(is_kept), kinds


def test_damaged_labels_come_first() -> None:
    truth, found = drawn_split(3, 200)
    wrong, kinds = damaged(truth, 30)
    for checkpoints in (found[1:], found):
        suspects = find_suspects(wrong, wrong.image_ids, checkpoints)
        assert [s.suspicion for s in suspects] == sorted(
            (s.suspicion for s in suspects), reverse=True
        )
        hits = dict.fromkeys(("class", "no box"), 0)
        for s in suspects[:60]:
            near = [
                k
                for (image, left), k in kinds.items()
                if image == s.image_id and abs(left - s.box[0]) < 20
            ]
            hits[s.kind if s.kind in near else "class"] += bool(near)
        assert sum(hits.values()) >= 30
        assert min(hits.values()) >= 10
    undamaged = find_suspects(truth, truth.image_ids, found)
    assert undamaged[20].suspicion < suspects[20].suspicion


def test_all_suspects_are_listed() -> None:
    truth, found = drawn_split(3, 600)
    swapped = truth._replace(labels=3 - truth.labels)
    assert len(find_suspects(swapped, truth.image_ids, found)) > 0.8 * len(truth.labels) > 1000


def test_an_object_that_no_checkpoint_finds_is_named() -> None:
    truth, found = drawn_split(4, 30)
    lost = int(np.argmax(truth.areas))
    image, box = int(truth.rows[lost]), truth.boxes[lost]
    parts = []
    for of_one in found:
        far = np.abs(of_one.boxes - box).max(axis=1) > 100
        kept = (of_one.image_ids != image) | far
        parts.append(Detections(*(column[kept] for column in of_one)))
    named = [s for s in find_suspects(truth, truth.image_ids, parts) if s.kind == "not found"]
    assert (image, round(float(box[0]), 1)) in {(s.image_id, s.box[0]) for s in named}
    assert all(s.label and not s.detected for s in named)
    is_lost = np.arange(len(truth.boxes)) == lost
    crowd, without = truth._replace(is_crowd=is_lost), truth.with_objects(~is_lost)
    one, other = (find_suspects(labels, truth.image_ids, parts) for labels in (crowd, without))
    assert one == other  # a crowd that is not found says nothing about the objects
