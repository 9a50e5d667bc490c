"""Crops against the plain-loop sampler of the replaced systems: the same statistics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ssdctl.input.counter_rng import uniform
from ssdctl.input.crop import (
    CROP_STREAM,
    Crops,
    crop_boxes,
    flip_boxes,
    sample_crops,
    whole_images,
)

NUM_DRAWS = 40_000
WHOLE = [0.0, 0.0, 1.0, 1.0]
SCENES: dict[str, list[reference.Box]] = {
    "small": [(0.42, 0.55, 0.5, 0.62)],
    "large": [(0.1, 0.05, 0.9, 0.95)],
    "three": [(0.05, 0.1, 0.45, 0.6), (0.3, 0.2, 0.95, 0.8), (0.7, 0.75, 0.8, 0.98)],
    "edge": [(0.0, 0.0, 0.25, 0.4)],
}


class Drawn(NamedTuple):
    """Many crops of one picture."""

    rect: np.ndarray  # N x 4
    kept: np.ndarray  # N x G: which boxes are kept
    first: np.ndarray  # N x 4: the first kept box, in fractions of the crop


def padded(boxes: list[reference.Box], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, G + 2, 4) boxes and labels 1 to G, then padding, for `count` equal pictures."""
    result = np.zeros((count, len(boxes) + 2, 4))
    labels = np.zeros((count, len(boxes) + 2), np.int64)
    result[:, : len(boxes)] = boxes
    labels[:, : len(boxes)] = np.arange(1, len(boxes) + 1)
    return result, labels


def drawn_by_ssdctl(boxes: list[reference.Box], seed: int = 0, count: int = NUM_DRAWS) -> Drawn:
    rows = np.arange(count)
    crops = sample_crops(seed, rows % 5, rows, *padded(boxes, count))
    kept = np.stack([(crops.labels == g + 1).any(axis=1) for g in range(len(boxes))], axis=1)
    return Drawn(crops.rect, kept, crops.boxes[:, 0].astype(np.float64))


def drawn_by_reference(boxes: list[reference.Box], count: int = NUM_DRAWS) -> Drawn:
    rng = random.Random(0)
    crops = [reference.sample_crop(boxes, rng) for _ in range(count)]
    kept = np.array([[g in c.kept for g in range(len(boxes))] for c in crops])
    return Drawn(np.array([c.rect for c in crops]), kept, np.array([c.boxes[0] for c in crops]))


def assert_same_mean(a: np.ndarray, b: np.ndarray, what: str) -> None:
    """Two samples' means differ by less than five standard errors of their difference."""
    error = np.sqrt(a.var() / len(a) + b.var() / len(b))
    assert abs(a.mean() - b.mean()) <= 5 * error + 1e-12, (what, a.mean(), b.mean(), error)


def assert_same_distribution(a: np.ndarray, b: np.ndarray, what: str) -> None:
    """Kolmogorov and Smirnov's distance, at a level of 1e-6: sqrt(ln(2 / level) / 2)."""
    grid = np.concatenate([a, b])
    shares = [np.searchsorted(np.sort(s), grid, side="right") / len(s) for s in (a, b)]
    distance = np.abs(shares[0] - shares[1]).max()
    limit = np.sqrt(np.log(2 / 1e-6) / 2) * np.sqrt(1 / len(a) + 1 / len(b))
    assert distance < limit, (what, distance, limit)


def least_iou(rect: np.ndarray, boxes: list[reference.Box]) -> np.ndarray:
    """Of each crop with the box that it fits worst: what the modes differ in."""
    low = np.maximum(rect[:, None, :2], np.array(boxes)[:, :2])
    high = np.minimum(rect[:, None, 2:], np.array(boxes)[:, 2:])
    overlap = (high - low).clip(0).prod(-1)
    areas = np.array([(b[2] - b[0]) * (b[3] - b[1]) for b in boxes])
    sides = rect[:, 2:] - rect[:, :2]
    return np.asarray((overlap / (areas + sides.prod(-1)[:, None] - overlap)).min(axis=1))


class Replayed(random.Random):
    """The numbers that ssdctl draws for one sample, for the loop to use in its own order."""

    def __init__(self, sample: tuple[int, int, int]) -> None:  # seed, epoch, row
        super().__init__(0)
        self.key = (CROP_STREAM, *sample)
        self.attempt, self.index = -1, 0

    def choice(self, seq: Sequence[Any]) -> Any:  # a mode: a new attempt begins
        self.attempt, self.index = self.attempt + 1, 0
        return seq[int(self._next() * len(seq))]

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self._next()

    def _next(self) -> float:
        self.index += 1
        return float(uniform(*self.key, self.attempt, self.index - 1)[0])


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.process
def test_equal_to_the_loop_on_the_same_numbers(scene: str) -> None:
    boxes, count = SCENES[scene], 150
    rows, epochs = np.arange(count), np.arange(count) % 3
    crops = sample_crops(4, epochs, rows, *padded(boxes, count))
    for i in range(count):
        expected = reference.sample_crop(boxes, Replayed((4, int(epochs[i]), i)))
        np.testing.assert_allclose(crops.rect[i], expected.rect, rtol=1e-14)
        kept = len(expected.kept)
        assert crops.labels[i, :kept].tolist() == [g + 1 for g in expected.kept]
        assert (crops.labels[i, kept:] == 0).all()
        np.testing.assert_allclose(crops.boxes[i, :kept], expected.boxes, atol=1e-6)


@pytest.mark.slow(in_ci=True)
@pytest.mark.parametrize("scene", SCENES)
def test_statistics_equal_the_replaced_systems(scene: str) -> None:
    boxes = SCENES[scene]
    actual, expected = drawn_by_ssdctl(boxes), drawn_by_reference(boxes)
    uncropped = [(d.rect == WHOLE).all(axis=1) for d in (actual, expected)]
    assert_same_mean(*(w.astype(float) for w in uncropped), "pictures left whole")
    # The modes show in how many crops fit every box by more than each threshold.
    fits = [least_iou(d.rect, boxes) for d in (actual, expected)]
    for threshold in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        over = [((f > threshold) & ~w).astype(float) for f, w in zip(fits, uncropped, strict=True)]
        assert_same_mean(*over, f"crops over {threshold}")
    rects = [d.rect[~w] for d, w in zip((actual, expected), uncropped, strict=True)]
    sides = [r[:, 2:] - r[:, :2] for r in rects]
    for axis, name in enumerate("xy"):
        assert_same_distribution(*(s[:, axis] for s in sides), f"side {name}")
        assert_same_distribution(*(r[:, axis] for r in rects), f"position {name}")
        assert_same_mean(*(s[:, axis] for s in sides), f"mean side {name}")
    assert_same_distribution(*(s[:, 0] / s[:, 1] for s in sides), "aspect")
    for g in range(len(boxes)):
        assert_same_mean(*(d.kept[:, g].astype(float) for d in (actual, expected)), f"box {g} kept")
    assert_same_mean(*(d.kept.sum(axis=1).astype(float) for d in (actual, expected)), "boxes kept")
    # Rounded, because whole pictures' boxes are equal but for fp32.
    boxes_left = [d.first.round(5) for d in (actual, expected)]
    for axis, name in enumerate("xy"):
        centres = [(b[:, axis] + b[:, axis + 2]).round(5) for b in boxes_left]
        assert_same_distribution(*centres, f"centre {name} of the first box kept")
        extents = [(b[:, axis + 2] - b[:, axis]).round(5) for b in boxes_left]
        assert_same_distribution(*extents, f"side {name} of the first box kept")


@pytest.mark.process
def test_share_of_uncropped_pictures_by_calculation() -> None:
    """A tiny box in the middle fails all five thresholds, so "whole" and "free" are left: an
    attempt ends whole with 1/7, cropped with 1/7 of the chance that a free crop is good."""
    side = 0.3 + 0.7 * (np.arange(1000) + 0.5) / 1000
    holds_centre = np.where(side >= 0.5, 1.0, side / (1 - side))  # per axis, over the positions
    aspect = side[:, None] / side
    good = ((aspect >= 0.5) & (aspect <= 2)) * holds_centre[:, None] * holds_centre
    expected = 1 / (1 + good.mean())
    drawn = drawn_by_ssdctl([(0.499, 0.499, 0.501, 0.501)], seed=3)
    share = (drawn.rect == WHOLE).all(axis=1).mean()
    assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS)


@pytest.mark.process
def test_each_crop_is_one_that_the_modes_allow() -> None:
    boxes = SCENES["three"]
    drawn = drawn_by_ssdctl(boxes, seed=1)
    cropped = drawn.rect[(drawn.rect != WHOLE).any(axis=1)]
    sides = cropped[:, 2:] - cropped[:, :2]
    assert 0.3 - 1e-12 <= sides.min() < 0.303
    assert 0.99 < sides.max() <= 1
    assert cropped.min() >= 0
    assert cropped.max() <= 1
    assert (sides[:, 0] / sides[:, 1]).min() >= 0.5
    assert (sides[:, 0] / sides[:, 1]).max() <= 2
    for rect, kept in zip(drawn.rect, drawn.kept, strict=True):
        assert kept.tolist() == [reference.centre_inside(rect, box) for box in boxes]
        assert kept.any()


def test_pictures_without_boxes_are_not_cropped() -> None:
    zeros, no_labels = np.zeros(50, np.int64), np.zeros((50, 3), np.int64)
    crops = sample_crops(0, zeros, np.arange(50), np.zeros((50, 3, 4)), no_labels)
    assert (crops.rect == WHOLE).all()
    assert (crops.labels == 0).all()


def assert_equal(a: Crops, b: Crops) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_draw_does_not_depend_on_the_rest_of_the_batch() -> None:
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 0.6, (64, 4, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0.05, 0.4, (64, 4, 2))], -1)
    labels = rng.integers(0, 5, (64, 4))
    labels[:, 0] = 1
    boxes[labels == 0] = 0
    epoch, row = rng.integers(0, 3, 64), rng.permutation(64)
    together = sample_crops(5, epoch, row, boxes, labels)
    for i in (0, 13, 63):
        one = slice(i, i + 1)
        single = sample_crops(5, epoch[one], row[one], boxes[one], labels[one])
        assert_equal(single, Crops(*(part[one] for part in together)))
    order = rng.permutation(64)
    shuffled = sample_crops(5, epoch[order], row[order], boxes[order], labels[order])
    assert_equal(shuffled, Crops(*(part[order] for part in together)))


def test_seed_epoch_and_row_each_change_the_crop() -> None:
    boxes, labels = padded(SCENES["large"], 200)
    rows, zeros = np.arange(200), np.zeros(200, np.int64)
    draws = [
        sample_crops(0, zeros, rows, boxes, labels).rect,
        sample_crops(1, zeros, rows, boxes, labels).rect,
        sample_crops(0, zeros + 1, rows, boxes, labels).rect,
        sample_crops(0, zeros, rows + 200, boxes, labels).rect,
    ]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert (a != b).any(axis=1).mean() > 0.5
    assert np.array_equal(draws[0], sample_crops(0, zeros, rows, boxes, labels).rect)


UNIT = st.floats(0, 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(2, 5, 4) boxes, some without area, and (2, 5) labels with padding in any place."""
    corners = draw(arrays(np.float64, (2, 5, 2, 2), elements=UNIT))
    labels = draw(arrays(np.int64, (2, 5), elements=st.integers(0, 3)))
    boxes = np.concatenate([corners.min(axis=2), corners.max(axis=2)], axis=-1)
    return np.where(labels[..., None] > 0, boxes, 0.0), labels


def check_kept(crops: Crops, boxes: np.ndarray, labels: np.ndarray) -> None:
    """Kept boxes are in the crop, first and in their order; the rest is zeros."""
    assert crops.boxes.dtype == np.float32
    assert crops.boxes.min() >= 0
    assert crops.boxes.max() <= 1
    assert (crops.boxes[..., :2] <= crops.boxes[..., 2:]).all()
    for i, rect in enumerate(crops.rect):
        chosen = [
            g
            for g in range(len(labels[i]))
            if labels[i, g] > 0 and reference.centre_inside(rect, boxes[i, g])
        ]
        assert crops.labels[i].tolist() == [
            *labels[i, chosen],
            *[0] * (len(labels[i]) - len(chosen)),
        ]
        left, top, right, bottom = rect
        sides = np.array([right - left, bottom - top] * 2)
        clipped = boxes[i, chosen].clip([left, top] * 2, [right, bottom] * 2)
        expected = (clipped - [left, top] * 2) / sides
        np.testing.assert_allclose(crops.boxes[i, : len(chosen)], expected, atol=1e-6)
        assert (crops.boxes[i, len(chosen) :] == 0).all()


@settings(max_examples=60, deadline=None)
@given(batches(), arrays(np.float64, (2, 4), elements=UNIT))
@pytest.mark.process
def test_any_crop_keeps_the_boxes_with_their_centre_in_it(
    batch: tuple[np.ndarray, np.ndarray], draw: np.ndarray
) -> None:
    size = 0.3 + 0.7 * draw[:, :2]
    low = draw[:, 2:] * (1 - size)
    check_kept(crop_boxes(np.concatenate([low, low + size], 1), *batch), *batch)


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(0, 2**31), st.integers(0, 10**6))
@pytest.mark.process
def test_sampled_crops_keep_the_boxes_with_their_centre_in_them(
    batch: tuple[np.ndarray, np.ndarray], seed: int, row: int
) -> None:
    boxes, labels = batch
    rows = np.array([row, row + 1])
    check_kept(sample_crops(seed, np.array([0, 3]), rows, boxes, labels), boxes, labels)


def test_many_boxes_keep_their_order() -> None:
    corner = np.random.default_rng(0).uniform(0, 0.9, (1, 93, 2))
    boxes, labels = np.concatenate([corner, corner + 0.1], -1), np.arange(1, 94)[None]
    check_kept(crop_boxes(np.array([[0.2, 0.2, 0.8, 0.7]]), boxes, labels), boxes, labels)


def test_whole_images_do_not_change_boxes() -> None:
    boxes, labels = padded(SCENES["three"], 2)
    crops = whole_images(boxes, labels)
    assert (crops.rect == WHOLE).all()
    np.testing.assert_array_equal(crops.boxes, boxes.astype(np.float32))
    np.testing.assert_array_equal(crops.labels, labels)


def test_flip() -> None:
    boxes, labels = padded([(0.125, 0.25, 0.5, 1.0)], 1)
    flipped = flip_boxes(boxes.astype(np.float32), labels)
    assert flipped[0].tolist() == [[0.5, 0.25, 0.875, 1.0], [0.0] * 4, [0.0] * 4]
    np.testing.assert_array_equal(flip_boxes(flipped, labels), boxes)
