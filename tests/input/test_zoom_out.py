"""Zooming out: pictures on a larger canvas, before the crop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.input.loader import TrainLoader
from ssdctl.input.resize import FILL_RGB, resize_crop
from ssdctl.input.sample_stream import SampleStream
from ssdctl.input.samples import LoaderConfig, draw_samples

CONFIG = LoaderConfig(5, 0, 256, 0, 1, 1, True, 18.0, 1, 8, zoom_out=True)


@pytest.fixture(scope="module")
def split(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Split:
    return open_dataset(shapes, tmp_path_factory.mktemp("store"))["train"]


def smooth_picture(width: int, height: int) -> np.ndarray:
    columns = np.linspace(0, 255, width)[None, :, None]
    rows = np.linspace(255, 0, height)[:, None, None]
    return np.broadcast_to((columns + rows) / 2, (height, width, 3)).round().astype(np.uint8)


def test_a_crop_that_leaves_the_picture_is_a_crop_of_the_canvas() -> None:
    pixels = smooth_picture(120, 80)
    left, top, right, bottom = box = (-60, -40, 180, 100)
    canvas = np.empty((bottom - top, right - left, 3), np.uint8)
    canvas[...] = FILL_RGB
    canvas[-top : -top + 80, -left : -left + 120] = pixels
    for flip in (False, True):
        out = np.empty((300, 300, 3), np.uint8)
        resize_crop(pixels, box, flip, out)
        expected = np.asarray(Image.fromarray(canvas).resize((300, 300), Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if flip else expected
        difference = np.abs(out.astype(int) - expected).max(axis=2)
        assert np.quantile(difference, 0.95) <= 2  # the edge of the picture is sharper
        assert (out[0, 0] == FILL_RGB).all()


def test_half_of_the_samples_are_zoomed_out_and_boxes_follow(split: Split) -> None:
    stream = SampleStream(split.trainable, CONFIG.seed)
    samples = draw_samples(split, stream, CONFIG, 0, CONFIG.batch_size)
    rect = samples.crops.rect
    leaves = ((rect[:, :2] < 0) | (rect[:, 2:] > 1)).any(axis=1)
    assert 0.3 < leaves.mean() < 0.55  # half are on a canvas; some crops then stay inside
    assert (rect[:, 2:] - rect[:, :2]).max() <= 4.05
    # A box in the crop, put back into the picture, is one of the picture's, clipped to the crop.
    for slot in np.flatnonzero(leaves)[:50]:
        row = samples.rows[slot]
        truth = split.boxes[split.starts[row] : split.starts[row + 1]].astype(float)
        size = rect[slot, 2:] - rect[slot, :2]
        for box, label in zip(samples.crops.boxes[slot], samples.crops.labels[slot], strict=True):
            if label == 0:
                continue
            if samples.flip[slot]:
                box = np.array([1 - box[2], box[1], 1 - box[0], box[3]])
            back = np.concatenate(
                [box[:2] * size + rect[slot, :2], box[2:] * size + rect[slot, :2]]
            )
            clipped = np.concatenate(
                [
                    np.maximum(truth[:, :2], rect[slot, :2]),
                    np.minimum(truth[:, 2:], rect[slot, 2:]),
                ],
                axis=1,
            )
            assert np.abs(clipped - back).max(axis=1).min() < 1e-5


def test_batches_have_filled_borders(split: Split) -> None:
    config = CONFIG._replace(batch_size=16)
    loader = TrainLoader(split, SampleStream(split.trainable, config.seed), config)
    images = next(iter(loader.batches(0, 1))).images.numpy()
    filled = (images == np.array(FILL_RGB, np.uint8)).all(axis=3).mean(axis=(1, 2))
    assert (filled > 0.2).any()
    assert (filled < 0.01).any()
