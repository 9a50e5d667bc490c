"""Random numbers never change; crops equal MLPerf's plain loop; zoom, flip, resizing, names."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from data.samples import sample
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from ssdctl.config.fields import Tiling
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.data.tiles import tiled
from ssdctl.input.augmentations import STREAMS, Boxes, Keys, View, hashed, uniform, whole
from ssdctl.input.augmentations.ssd import crop
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import FILL_RGB, TrainLoader, resize_crop

WHOLE = [0.0, 0.0, 1.0, 1.0]
SCENES: dict[str, list[reference.Box]] = {
    "small": [(0.42, 0.55, 0.5, 0.62)],
    "large": [(0.1, 0.05, 0.9, 0.95)],
    "three": [(0.05, 0.1, 0.45, 0.6), (0.3, 0.2, 0.95, 0.8), (0.7, 0.75, 0.8, 0.98)],
    "edge": [(0.0, 0.0, 0.25, 0.4)],
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=6))
def test_random_numbers_equal_those_of_unbounded_integers(keys: list[int]) -> None:
    expected = reference.hashed(*keys)
    assert hashed(*keys).tolist() == [expected]
    assert uniform(*keys).tolist() == [(expected >> 11) / 2**53]


def test_random_numbers_never_change() -> None:
    """A change here changes every crop and order of every run: resumed runs would differ."""
    assert hashed(2, 7, 3, 117265, 5, 4).tolist() == [0x7946B36C8C9A0AC5]
    assert STREAMS == {"crop": 2, "flip": 3, "color": 4, "zoom": 5}


def sampled(seed: int, epochs: np.ndarray, rows: np.ndarray, boxes: Boxes) -> View:
    """Return crops cut at pixels so small that rounding does not matter."""
    config = LoaderConfig(seed=seed, batch_size=1, threads=1, max_boxes=1)
    view = whole(boxes, np.full((len(rows), 2), 1 << 30, np.int32))
    keys = Keys(STREAMS["crop"], config, epochs, rows)
    return crop.apply(view, crop.draw(keys, view.boxes, view.sizes))


def cropped(rect: np.ndarray, boxes: Boxes) -> View:
    return crop.apply(whole(boxes, np.full((len(rect), 2), 300, np.int32)), rect)


def padded(boxes: list[reference.Box], count: int) -> Boxes:
    """(count, G + 2, 4) boxes and labels 1 to G, then padding, for `count` equal images."""
    result = np.zeros((count, len(boxes) + 2, 4))
    labels = np.zeros((count, len(boxes) + 2), np.int64)
    result[:, : len(boxes)] = boxes
    labels[:, : len(boxes)] = np.arange(1, len(boxes) + 1)
    return Boxes(result, labels)


class Replayed(random.Random):
    """The numbers that ssdctl draws for one sample, for the loop to use in its own order."""

    def __init__(self, sample: tuple[int, int, int]) -> None:  # seed, epoch, row
        super().__init__(0)
        self.key = (STREAMS["crop"], *sample)
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
def test_equal_to_the_loop_on_the_same_numbers(scene: str) -> None:
    boxes, count = SCENES[scene], 150
    rows, epochs = np.arange(count), np.arange(count) % 3
    view = sampled(4, epochs, rows, padded(boxes, count))
    for i in range(count):
        expected = reference.sample_crop(boxes, Replayed((4, int(epochs[i]), i)))
        np.testing.assert_allclose(view.rect[i], expected.rect, atol=2e-9)
        kept = len(expected.kept)
        assert view.boxes.labels[i, :kept].tolist() == [g + 1 for g in expected.kept]
        assert (view.boxes.labels[i, kept:] == 0).all()
        np.testing.assert_allclose(view.boxes.ltrb[i, :kept], expected.boxes, atol=1e-6)


UNIT = st.floats(0, 1)


@st.composite
def batches(draw: st.DrawFn) -> Boxes:
    """(2, 5, 4) boxes, some without area, and (2, 5) labels with padding in any place."""
    corners = draw(arrays(np.float64, (2, 5, 2, 2), elements=UNIT))
    labels = draw(arrays(np.int64, (2, 5), elements=st.integers(0, 3)))
    ltrb = np.concatenate([corners.min(axis=2), corners.max(axis=2)], axis=-1)
    return Boxes(np.where(labels[..., None] > 0, ltrb, 0.0), labels)


def check_kept(view: View, before: Boxes) -> None:
    """Kept boxes are in the crop, first and in their order; the rest is zeros."""
    ltrb, labels = view.boxes
    assert ltrb.dtype == np.float32
    assert ltrb.min() >= 0
    assert ltrb.max() <= 1
    assert (ltrb[..., :2] <= ltrb[..., 2:]).all()
    for i, rect in enumerate(view.rect):
        chosen = [
            g
            for g, label in enumerate(before.labels[i])
            if label > 0 and reference.center_inside(rect, before.ltrb[i, g])
        ]
        padding = [0] * (len(before.labels[i]) - len(chosen))
        assert labels[i].tolist() == [*before.labels[i, chosen], *padding]
        low, sides = np.tile(rect[:2], 2), np.tile(rect[2:] - rect[:2], 2)
        clipped = before.ltrb[i, chosen].clip(low, np.tile(rect[2:], 2))
        np.testing.assert_allclose(ltrb[i, : len(chosen)], (clipped - low) / sides, atol=1e-6)
        assert (ltrb[i, len(chosen) :] == 0).all()


@settings(max_examples=60, deadline=None)
@given(batches(), arrays(np.float64, (2, 4), elements=UNIT))
def test_a_crop_keeps_the_boxes_with_their_center_in_it(batch: Boxes, draw: np.ndarray) -> None:
    size = 0.3 + 0.7 * draw[:, :2]
    low = draw[:, 2:] * (1 - size)
    check_kept(cropped(np.concatenate([low, low + size], 1), batch), batch)


def test_colors_are_drawn_around_one_and_no_turn(split: Split) -> None:
    view = TrainLoader(split, ZOOM._replace(augment="color", hue_degrees=90.0)).draw(0, 2).view
    spread = np.array([0.125, 0.5, 0.5, np.pi / 2])
    row = TrainLoader(split, ZOOM).draw(0, 2).rows[1]
    numbers = [reference.hashed(STREAMS["color"], 5, 0, int(row), n) / 2**64 for n in range(4)]
    expected = np.array([1, 1, 1, 0]) + spread * (2 * np.array(numbers) - 1)
    np.testing.assert_allclose(view.jitter[1], expected, atol=1e-6)


ZOOM = LoaderConfig(seed=5, batch_size=256, threads=1, max_boxes=8, augment="ssd-zoom")


@pytest.fixture(scope="module")
def split(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Split:
    return open_dataset(shapes, tmp_path_factory.mktemp("store"))["train"]


@settings(max_examples=60, deadline=None)
@given(
    box=st.tuples(
        st.integers(0, 299), st.integers(0, 199), st.integers(1, 300), st.integers(1, 200)
    ),
    flip=st.booleans(),
)
def test_a_crop_is_within_one_level_of_pillows(box: tuple[int, int, int, int], flip: bool) -> None:
    left, top = min(box[0], box[2] - 1), min(box[1], box[3] - 1)
    window = (left, top, max(box[2], left + 1), max(box[3], top + 1))
    pixels = np.array(sample(300, 200, 5))
    out = np.zeros((300, 300, 3), np.uint8)
    resize_crop(pixels, window, flip, out)
    cut = Image.fromarray(pixels).crop(window)
    expected = np.asarray(cut.resize((300, 300), Image.Resampling.BILINEAR)).astype(int)
    error = np.abs(out[:, ::-1] - expected if flip else out - expected)
    assert error.max() <= 1
    assert error.mean() < 0.1


def test_a_crop_that_leaves_the_image_is_a_crop_of_the_canvas() -> None:
    columns, rows = np.linspace(0, 255, 120)[None, :, None], np.linspace(255, 0, 80)[:, None, None]
    pixels = np.broadcast_to((columns + rows) / 2, (80, 120, 3)).round().astype(np.uint8)
    left, top, right, bottom = box = (-60, -40, 180, 100)
    canvas = np.empty((bottom - top, right - left, 3), np.uint8)
    canvas[...] = FILL_RGB
    canvas[-top : -top + 80, -left : -left + 120] = pixels
    for is_mirrored in (False, True):
        out = np.empty((300, 300, 3), np.uint8)
        resize_crop(pixels, box, is_mirrored, out)
        expected = np.asarray(Image.fromarray(canvas).resize((300, 300), Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if is_mirrored else expected
        difference = np.abs(out.astype(int) - expected).max(axis=2)
        assert np.quantile(difference, 0.95) <= 2  # the edge of the image is sharper
        assert (out[0, 0] == FILL_RGB).all()
    for outside in ((-50, 0, 0, 80), (125, 0, 150, 80), (0, -50, 120, -5), (0, 83, 120, 93)):
        resize_crop(pixels, outside, False, out)
        assert (out == FILL_RGB).all()


@pytest.mark.parametrize("tiling", [None, Tiling(100, 0.2)])
def test_a_crop_of_only_canvas_reads_no_image_as_bad(split: Split, tiling: Tiling | None) -> None:
    empty = tiled(split, tiling)
    empty = empty._replace(trainable=empty.background)
    for batch in TrainLoader(empty, ZOOM._replace(batch_size=64)).batches(0, 4):
        assert not batch.bad


def test_half_of_the_samples_are_zoomed_out_and_filled(split: Split) -> None:
    rect = TrainLoader(split, ZOOM).draw(0).view.rect
    leaves = ((rect[:, :2] < 0) | (rect[:, 2:] > 1)).any(axis=1)
    assert 0.3 < leaves.mean() < 0.55  # half are on a canvas; some crops then stay inside
    assert (rect[:, 2:] - rect[:, :2]).max() <= 4.05
    loader = TrainLoader(split, ZOOM._replace(batch_size=16))
    images = next(iter(loader.batches(0, 1))).images.numpy()
    filled = (images == np.array(FILL_RGB, np.uint8)).all(axis=3).mean(axis=(1, 2))
    assert (filled > 0.2).any()
    assert (filled < 0.01).any()
