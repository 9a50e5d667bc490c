"""Intervals of AP, and of the difference of two detectors, by a bootstrap over images.

    scoring = run_scoring(truth, detections)
    draws = resample(scoring, match_objects(scoring))
    low, high = intervals(draws)[0]["AP"]

Each draw takes as many images as there are, with replacement. Detections are matched with the
objects once; a draw only counts the matches again, weighted by how often their image was drawn.
Shapes: N images, K detections, H hits (detections that match an object), R draws, C classes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.evaluation.coco_ap import COCO_METRICS, IOU_THRESHOLDS, Scoring
from ssdctl.evaluation.matches import Floats, Ints, Matches
from ssdctl.runs.evaluation import Difference, Interval
from ssdctl.runtime.system import usable_cores

NUM_DRAWS = 1000
SEED = 0  # two detectors on the same images get the same draws
METRICS = tuple(name for name in COCO_METRICS if name.startswith("AP"))
RECALLS = np.linspace(0, 1, 101)
MIN_IMAGES = 3  # fewer say nothing about other images
MAX_IMAGES = 1_000_000  # that are asked for to show a difference
NO_SPREAD = 1e-9  # margins below it: all draws are equal
# An interval ends at most as far away as this many margins, or as that of a proportion. Wider ones
# contained the mean of simulated sets no more often.
WIDEST = 1.5
MAX_COUNTED = 1 << 20  # draws x detections at a time: 4 MB


class Draws(NamedTuple):
    """The metrics of R draws; row 0 is the mean of the classes. An undefined metric is NaN."""

    estimates: Floats  # (1 + C) x METRICS, of the images themselves
    values: Floats  # R x (1 + C) x METRICS
    images: Ints  # (1 + C) x METRICS: those with objects of any class and the size, of the class


def resample(
    scoring: Scoring, matches: list[list[Matches]], num_draws: int = NUM_DRAWS, seed: int = SEED
) -> Draws:
    """Return the AP of draws of the scored images, for each class, IoU and size."""
    count = len(scoring.image_ids)
    rng = np.random.default_rng(seed)
    drawn = (np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(num_draws))
    weights = np.array([np.ones(count), *drawn], np.int32)
    with ThreadPoolExecutor(usable_cores()) as pool:
        classes = list(pool.map(lambda areas: _class_values(areas, weights), matches))
    values = np.stack(classes, axis=1)
    is_defined = ~np.isnan(values)
    totals = np.where(is_defined, values, 0).sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        means = totals / is_defined.sum(axis=1, keepdims=True)
    values = np.concatenate([means, values], axis=1)
    return Draws(values[0], values[1:], _num_images(matches))


def _num_images(matches: list[list[Matches]]) -> Ints:
    """Return how many images can show something: those with objects."""
    columns = []
    for name in METRICS:
        objects = [areas[COCO_METRICS[name][2]].objects for areas in matches]
        columns.append([len(np.unique(part)) for part in (np.concatenate(objects), *objects)])
    return np.array(columns).T


def _class_values(areas: list[Matches], weights: NDArray[np.int32]) -> Floats:
    """Return the values of METRICS of a class: draws x METRICS."""
    by_area = [average_precision(matches, weights) for matches in areas]
    columns = []
    for name in METRICS:
        _, iou, area, _ = COCO_METRICS[name]
        chosen = slice(None) if iou is None else np.isclose(IOU_THRESHOLDS, iou)
        columns.append(by_area[area][:, chosen].mean(axis=1))
    return np.stack(columns, axis=1)


def average_precision(matches: Matches, weights: NDArray[np.int32]) -> Floats:
    """Return pycocotools' AP at each IoU threshold with weighted images; NaN without objects.

    Precision is the highest one at a recall or a higher one, so it is computed only at hits.
    """
    rows = max(MAX_COUNTED // max(len(matches.images), len(matches.objects), 1), 1)
    parts = [
        _average_precision(matches, weights[n : n + rows]) for n in range(0, len(weights), rows)
    ]
    return np.concatenate(parts)


def _average_precision(matches: Matches, weights_RN: NDArray[np.int32]) -> Floats:
    result = np.zeros((len(weights_RN), len(IOU_THRESHOLDS)))
    num_objects = weights_RN.take(matches.objects, axis=1).sum(axis=1, keepdims=True)
    offsets, reached = _reached_recalls(num_objects)
    weights_RK = weights_RN.take(matches.images, axis=1)
    counts_RK = weights_RK.cumsum(axis=1, dtype=np.int32)
    for n, (hits, ignored) in enumerate(zip(matches.hits, matches.ignored, strict=True)):
        if not len(hits):
            continue
        weights_RH = weights_RK.take(hits, axis=1)
        hits_RH, all_RH = weights_RH.cumsum(axis=1, dtype=np.int32), counts_RK.take(hits, axis=1)
        if len(ignored):
            before = np.pad(weights_RK.take(ignored, axis=1).cumsum(axis=1), ((0, 0), (1, 0)))
            all_RH = all_RH - before.take(np.searchsorted(ignored, hits), axis=1)
        precision_RH = hits_RH / (all_RH + np.spacing(1))
        highest_RH = np.maximum.accumulate(precision_RH[:, ::-1], axis=1)[:, ::-1]
        recalls_RH = reached.take(hits_RH + offsets)
        added_RH = np.diff(recalls_RH, axis=1, prepend=0)
        result[:, n] = np.einsum("rh,rh->r", highest_RH, added_RH) / len(RECALLS)
    return np.where(num_objects > 0, result, np.nan)


def _reached_recalls(num_objects: Ints) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return a table of how many of RECALLS a number of hits reaches, and each draw's start in it.

    Args:
        num_objects: R x 1.
    """
    required = np.ceil(RECALLS * num_objects - 1e-9)
    with np.errstate(invalid="ignore", divide="ignore"):
        required += required / num_objects < RECALLS  # by a rounding error
    size = int(num_objects.max()) + 2
    offsets = np.arange(len(num_objects), dtype=np.int32)[:, None] * size
    places = (offsets + np.maximum(required, 1)).astype(np.int64).ravel()
    counts = np.bincount(places, minlength=size * len(num_objects)).reshape(-1, size)
    return offsets, counts.cumsum(axis=1, dtype=np.int32).ravel()


def intervals(draws: Draws) -> list[dict[str, Interval]]:
    """Return the 95% interval of each metric: of the mean of the classes, then of each class.

    It is symmetric on the logit scale, so that it stays within 0 to 1, but near 0 or 1 not much
    wider than that of a proportion. A metric that is not defined, or that draws leave undefined too
    often, has none.
    """
    result = []
    for row, margins in enumerate(_margins(draws.values, draws.images)):
        found = {}
        columns = draws.estimates[row], margins, draws.images[row]
        for name, value, margin, count in zip(METRICS, *columns, strict=True):
            if not np.isnan(value + margin):
                low, high = _ends_without_spread(value, count)
                if margin >= NO_SPREAD:
                    odds = value / max(1 - value, 1e-12)
                    factor = np.exp(min(margin / max(value * (1 - value), 1e-12), 50))
                    low = max(min(low, value - WIDEST * margin), 1 - 1 / (1 + odds / factor))
                    high = min(max(high, value + WIDEST * margin), 1 - 1 / (1 + odds * factor))
                found[name] = round(float(low), 4), round(float(high), 4)
        result.append(found)
    return result


def _ends_without_spread(value: float, num_images: int) -> tuple[float, float]:
    """Return the ends where all draws are equal: as of N hits in N trials, or none (binomial)."""
    share = 0.025 ** (1 / num_images)
    return value * share, 1 - (1 - value) * share


def differences(a: Draws, b: Draws) -> list[dict[str, Difference]]:
    """Return b - a of each metric with its 95% interval, in the order of `intervals`."""
    estimates, margins = b.estimates - a.estimates, _margins(b.values - a.values, a.images)
    result = []
    for columns in zip(estimates, margins, a.images, strict=True):
        found = {}
        for name, value, margin, count in zip(METRICS, *columns, strict=True):
            if not np.isnan(value + margin):
                ends = value - margin, value + margin
                if margin < NO_SPREAD < abs(value):
                    low, high = _ends_without_spread((value + 1) / 2, count)
                    ends = 2 * low - 1, 2 * high - 1
                found[name] = Difference(*map(float, (value, *ends)))
        result.append(found)
    return result


def _margins(values: Floats, images: Ints) -> Floats:
    """Return the margins of 95% intervals, (1 + C) x METRICS; NaN where they are unknown.

    Few images vary less in draws than in reality: Student's quantile and the factor correct it.
    """
    is_defined = ~np.isnan(values)
    num_defined = is_defined.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(is_defined, values, 0).sum(axis=0) / num_defined
        squares = np.where(is_defined, values - mean, 0) ** 2
        spread = np.sqrt(squares.sum(axis=0) / (num_defined - 1))
        quantiles, count = _student(images - 1), images.astype(np.float64)
        margins = spread * quantiles * np.sqrt(count / (count - 1))
    is_known = (num_defined > len(values) / 2) & (images >= MIN_IMAGES)
    return np.where(is_known, margins, np.nan)


def _student(degrees: Ints) -> Floats:
    """Return the 97.5% quantile of Student's distribution: its expansion (Abramowitz 26.7.5)."""
    z, n = 1.959964, np.maximum(degrees, 1).astype(np.float64)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def images_needed(difference: Difference, num_images: int) -> int | None:
    """Return about how many images would show a difference of this size; None: a million do not."""
    near = difference.low if difference.estimate > 0 else difference.high  # the end beyond 0
    margin = abs(difference.estimate - near)
    if abs(difference.estimate) * np.sqrt(MAX_IMAGES / num_images) <= margin:
        return None
    needed = max(num_images * (margin / difference.estimate) ** 2, 1)
    step = 10 ** max(int(np.log10(needed)) - 1, 0)
    return int(np.ceil(needed / step)) * step
