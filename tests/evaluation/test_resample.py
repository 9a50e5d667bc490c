"""Intervals of AP: what a draw counts, and how often an interval contains the expected AP."""

import json
from pathlib import Path

import numpy as np
from conftest import Cli
from evaluation.judge import pycocotools_figures
from numpy.typing import NDArray

from ssdctl.benchmark.evaluate import make_split
from ssdctl.data.annotations import Annotations, ClassName
from ssdctl.data.coco_json import document_of
from ssdctl.evaluation.analysis import compare, score_and_resample
from ssdctl.evaluation.coco_ap import Detections, run_scoring
from ssdctl.evaluation.matches import match_objects
from ssdctl.evaluation.resample import METRICS, SEED, Draws, differences, intervals, resample
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo

SIDE = 300


def test_a_draw_counts_an_image_as_often_as_it_is_drawn() -> None:
    truth, found = make_split(60, 600, 4000)
    scoring = run_scoring(truth, found)
    draws = resample(scoring, match_objects(scoring), num_draws=3)
    rng = np.random.default_rng(SEED)
    for values in draws.values:
        drawn = np.sort(rng.integers(0, 60, 60))
        rows = [np.flatnonzero(truth.rows == image) for image in drawn]
        copies = np.repeat(np.arange(60), [len(r) for r in rows]).astype(np.int32)
        objects = np.concatenate(rows)
        repeated = truth._replace(
            ids=np.arange(1, len(objects) + 1),
            rows=copies,
            **{n: getattr(truth, n)[objects] for n in ("labels", "boxes", "areas", "is_crowd")},
        )
        parts = [
            Detections(np.full(int(own.sum()), n), *(column[own] for column in found[1:]))
            for n, image in enumerate(drawn)
            for own in [found.image_ids == image]
        ]
        document = json.loads(json.dumps(document_of(repeated)))
        expected = pycocotools_figures(document, Detections.joined(parts))[: len(METRICS)]
        np.testing.assert_allclose(values[0], expected, rtol=0, atol=1e-12)


def drawn_split(seed: int, num_images: int = 60) -> tuple[Annotations, list[Detections]]:
    """Return images of two classes, and the detections of a weaker and a better detector."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(num_images), rng.poisson(3, num_images))
    count = len(rows)
    size = np.exp(rng.uniform(np.log(15), np.log(150), (count, 2)))
    boxes = np.concatenate([rng.uniform(0, 1, (count, 2)) * (SIDE - size), size], axis=1)
    truth = Annotations(
        folder=Path(),
        origin=Path("drawn"),
        image_ids=np.arange(num_images),
        file_names=[f"{n}.jpg" for n in range(num_images)],
        sizes=np.full((num_images, 2), SIDE),
        classes=[ClassName(1, "common"), ClassName(2, "rare")],
        ids=np.arange(1, count + 1),
        rows=rows.astype(np.int32),
        labels=rng.choice([1, 2], count, p=[0.7, 0.3]).astype(np.int32),
        boxes=boxes,
        areas=size[:, 0] * size[:, 1],
        is_crowd=np.zeros(count, np.bool_),
    )
    difficulty = rng.normal(0, 0.7, num_images)[rows] + rng.normal(0, 0.7, count)
    return truth, [_detections(rng, truth, quality - difficulty) for quality in (1.0, 1.3)]


def _detections(
    rng: np.random.Generator, truth: Annotations, ease: NDArray[np.float64]
) -> Detections:
    ease = ease + rng.normal(0, 0.5, len(ease))
    found = ease > -0.5
    noise = rng.normal(0, 0.07, (len(ease), 4)) * truth.boxes[:, [2, 3, 2, 3]]
    near = truth.boxes + noise * np.exp(-0.4 * ease)[:, None]
    false = np.repeat(truth.image_ids, rng.poisson(2, len(truth.image_ids)))
    size = np.exp(rng.uniform(np.log(15), np.log(150), (len(false), 2)))
    far = np.concatenate([rng.uniform(0, 1, (len(false), 2)) * (SIDE - size), size], axis=1)
    scores = np.concatenate([ease[found], rng.normal(-2, 1, len(false))])
    return Detections(
        np.concatenate([truth.rows[found].astype(np.int64), false]),
        np.concatenate([near[found], far]),
        1 / (1 + np.exp(-scores)),
        np.concatenate([truth.labels[found], rng.integers(1, 3, len(false))]).astype(np.int64),
    )


Covered = dict[tuple[str, int, str], float]  # what, row of the classes, metric


def coverage(num_sets: int) -> Covered:
    """Return how often intervals contain the mean of all sets."""
    results = []
    for seed in range(num_sets):
        truth, found = drawn_split(seed)
        scorings = [run_scoring(truth, f) for f in found]
        a, b = (resample(s, match_objects(s), num_draws=200, seed=seed) for s in scorings)
        results.append((a, b, intervals(a), intervals(b), differences(a, b)))
    covered = {}
    for row in range(3):
        for name in METRICS[:2]:
            at = row, METRICS.index(name)
            values = np.array([[r[0].estimates[at], r[1].estimates[at]] for r in results])
            for what, mean, ends in (
                ("A", values[:, 0].mean(), [r[2][row][name] for r in results]),
                ("B", values[:, 1].mean(), [r[3][row][name] for r in results]),
                (
                    "B - A",
                    (values[:, 1] - values[:, 0]).mean(),
                    [(d.low, d.high) for r in results for d in [r[4][row][name]]],
                ),
            ):
                inside = [low <= mean <= high for low, high in ends]
                covered[what, row, name] = float(np.mean(inside))
    return covered


def test_95_percent_of_intervals_contain_the_expected_ap() -> None:
    covered = coverage(80)
    assert 0.93 <= np.mean(list(covered.values())) <= 0.97, covered


def smaller(scored: tuple[Evaluation, Draws]) -> tuple[Evaluation, Draws]:
    """Return AP near 0, whose differences are decided in the same way."""
    evaluation, draws = scored
    return evaluation, Draws(draws.estimates / 1e4, draws.values / 1e4, draws.images)


def test_too_few_images_show_no_difference_and_more_are_named() -> None:
    about = EvaluationInfo(source="x.json", data=".", store=".", split="val")
    truth, found = drawn_split(2, 12)
    many_truth, many = drawn_split(2, 400)
    few, enough = (
        compare(*(smaller(score_and_resample(t, f, about)) for f in detections))
        for t, detections in ((truth, found), (many_truth, many))
    )
    assert few.better is None
    assert 12 < few.images_needed < 400
    assert few.verdict() == (
        f"no difference can be shown with 12 images; about {few.images_needed:,} would be needed"
    )
    assert enough.better == "b"


def test_only_images_with_objects_count(tmp_path: Path) -> None:
    """Of 100 images 2 or 4 have an object; 99 have one of another size."""
    about = EvaluationInfo(source="x.json", data=".", store=".", split="val")
    truth, _ = drawn_split(0, 100)
    for count, has_interval in ((2, False), (4, True)):
        rows = np.arange(count, dtype=np.int32)
        one = truth.with_objects(np.isin(np.arange(len(truth.ids)), rows))
        one = one._replace(rows=rows, labels=np.ones(count, np.int32))
        found = Detections(one.object_image_ids, one.boxes, np.ones(count), np.ones(count, int))
        none = Detections(*(column[:0] for column in found))
        a, b = (score_and_resample(one, part, about) for part in (none, found))
        assert bool(b[0].intervals) == has_interval
        low = 0.025 ** (1 / count)
        assert not has_interval or b[0].intervals["AP"] == (round(low, 4), 1)
        assert compare(a, b).better is None
        assert (compare(a, b).images_needed or 99) > count


def test_the_better_detector_is_named(cli: Cli) -> None:
    truth, (weak, good) = drawn_split(0)
    rng = np.random.default_rng(0)
    weak = weak._replace(scores=weak.scores * rng.uniform(0, 1, len(weak.scores)))
    Path("truth.json").write_text(json.dumps(document_of(truth)))
    ids = np.array([c.id for c in truth.classes])[truth.labels - 1]
    perfect = Detections(truth.object_image_ids, truth.boxes, np.ones(len(ids)), ids)
    none = Detections(*(column[:0] for column in good))
    pairs = ("weak", weak), ("good", good), ("perfect", perfect), ("none", none)
    for name, found in pairs:
        Path(f"{name}.json").write_text(json.dumps(found.to_coco()))
    data = ("--data", "truth.json")
    assert cli("evaluate", "weak.json", "--against", "good.json", *data).out.startswith(
        "B is better"
    )
    codes = ("weak", "good", 10), ("good", "weak", 0), ("good", "good", 0), ("none", "perfect", 10)
    for a, b, code in codes:
        command = ("evaluate", f"{a}.json", "--against", f"{b}.json", *data, "--fail-if-worse")
        assert cli(*command).code == code
