"""Batches are a function of (seed, step): not of threads, nor of where a run began."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.errors import DataError
from ssdctl.input.loader import Batch, TrainLoader, evaluation_batches
from ssdctl.input.sample_stream import SampleStream
from ssdctl.input.samples import LoaderConfig, draw_samples

PLAN = LoaderConfig(
    seed=4,
    first_sample=0,
    batch_size=5,
    rank=0,
    world_size=1,
    accumulate=1,
    augment=True,
    hue_degrees=18.0,
    threads=2,
    max_boxes=12,
)


@pytest.fixture(scope="module")
def splits(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Split]:
    return open_dataset(shapes, tmp_path_factory.mktemp("store"))


def read_batches(split: Split, plan: LoaderConfig, steps: range) -> list[Batch]:
    """Copies of a run's batches: the pixel buffers are reused."""
    loader = TrainLoader(split, SampleStream(split.trainable, plan.seed), plan)
    batches = loader.batches(steps.start, steps.stop)
    return [batch._replace(images=batch.images.clone()) for batch in batches]


def assert_same(actual: list[Batch], expected: list[Batch]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        for name in ("images", "boxes", "labels", "jitter"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("augment", [True, False])
def test_more_padding_changes_nothing_else(splits: dict[str, Split], augment: bool) -> None:
    split, plan = splits["train"], PLAN._replace(augment=augment)
    stream = SampleStream(split.trainable, plan.seed)
    narrow, wide = (
        draw_samples(split, stream, plan._replace(max_boxes=n), 0, 20).crops for n in (12, 30)
    )
    assert wide.boxes.shape == (20, 30, 4)
    assert np.array_equal(wide.rect, narrow.rect)
    assert np.array_equal(wide.boxes[:, :12], narrow.boxes)
    assert np.array_equal(wide.labels[:, :12], narrow.labels)
    assert not wide.boxes[:, 12:].any()
    assert not wide.labels[:, 12:].any()


@pytest.mark.process
def test_threads_change_nothing(splits: dict[str, Split]) -> None:
    steps = range(10)  # two epochs
    once = read_batches(splits["train"], PLAN._replace(threads=1), steps)
    assert_same(once, read_batches(splits["train"], PLAN._replace(threads=2), steps))
    assert_same(once, read_batches(splits["train"], PLAN._replace(threads=5), steps))


@pytest.mark.process
def test_a_resumed_run_continues_with_the_same_batches(splits: dict[str, Split]) -> None:
    complete = read_batches(splits["train"], PLAN, range(8))
    assert_same(complete[3:], read_batches(splits["train"], PLAN, range(3, 8)))
    later = PLAN._replace(first_sample=3 * 5)
    assert_same(complete[3:], read_batches(splits["train"], later, range(5)))


@pytest.mark.process
def test_two_ranks_and_accumulation_take_the_same_global_batches(splits: dict[str, Split]) -> None:
    complete = read_batches(splits["train"], PLAN._replace(batch_size=8), range(4))
    shared = [
        read_batches(
            splits["train"],
            PLAN._replace(batch_size=2, world_size=2, rank=r, accumulate=2),
            range(4),
        )
        for r in (0, 1)
    ]
    for step, batch in enumerate(complete):
        parts = [shared[rank][2 * step + part] for part in (0, 1) for rank in (0, 1)]
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)
        assert torch.equal(torch.cat([p.boxes for p in parts]), batch.boxes)


@pytest.mark.parametrize("accumulate", [1, 3, 6])
@pytest.mark.process
def test_a_steps_batches_are_good_until_the_next_step(
    splits: dict[str, Split], accumulate: int
) -> None:
    """The caller keeps all micro-batches of a step; none of their buffers may be reused."""
    plan = PLAN._replace(batch_size=1, accumulate=accumulate)
    copies = read_batches(splits["train"], plan, range(4))
    loader = TrainLoader(splits["train"], SampleStream(splits["train"].trainable, plan.seed), plan)
    batches = loader.batches(0, 4)
    for step in range(4):
        held = [next(batches) for _ in range(accumulate)]
        time.sleep(0.05)  # what is decoded ahead lands meanwhile
        for part, batch in enumerate(held):
            assert torch.equal(batch.images, copies[step * accumulate + part].images)


@pytest.mark.process
def test_shapes_are_static_and_boxes_are_in_the_picture(splits: dict[str, Split]) -> None:
    for batch in read_batches(splits["train"], PLAN, range(20)):
        assert batch.images.shape == (5, 300, 300, 3)
        assert batch.images.dtype == torch.uint8
        assert batch.boxes.shape == (5, 12, 4)
        assert batch.boxes.min() >= 0
        assert batch.boxes.max() <= 1
        real = batch.labels > 0
        assert real.any(dim=1).all()
        assert (batch.boxes[real][:, 2:] > batch.boxes[real][:, :2]).all()
        assert (batch.boxes[~real] == 0).all()


def test_without_augmentation_pictures_are_resized_as_pillow_does(
    splits: dict[str, Split], shapes: Path
) -> None:
    (batch,) = read_batches(splits["train"], PLAN._replace(augment=False), range(1))
    assert batch.jitter is None
    for i, row in enumerate(batch.rows):
        name = f"{splits['train'].image_ids[row]:012d}.jpg"
        with Image.open(shapes / "train2017" / name) as picture:
            expected = np.asarray(picture.resize((300, 300), Image.Resampling.BILINEAR))
        assert np.array_equal(batch.images[i].numpy(), expected)


def white_boxes(folder: Path) -> Path:
    """Create a dataset of black pictures, each with one annotated white box on its left."""
    images, annotations = [], []
    (folder / "train2017").mkdir(parents=True)
    for number in range(1, 7):
        picture = np.zeros((90, 120, 3), np.uint8)
        left, top, width, height = 5 + number, 10 * number, 30, 25
        picture[top : top + height, left : left + width] = 255
        name = f"{number}.jpg"
        Image.fromarray(picture).save(folder / "train2017" / name, quality=95)
        images.append({"id": number, "file_name": name, "width": 120, "height": 90})
        box = [left, top, width, min(height, 90 - top)]
        annotations.append({"id": number, "image_id": number, "category_id": 1, "bbox": box})
    document = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1, "name": "white"}],
    }
    (folder / "annotations").mkdir()
    (folder / "annotations/instances_train2017.json").write_text(json.dumps(document))
    return folder


@pytest.mark.process
def test_flipped_pictures_and_boxes_belong_together(tmp_path: Path) -> None:
    """A white box stays where its annotation is, whatever the crop and the flip."""
    data = white_boxes(tmp_path / "data")
    split = open_dataset(data, tmp_path / "store")["train"]
    sides = []
    for batch in read_batches(split, PLAN, range(20)):
        for picture, boxes, labels in zip(batch.images, batch.boxes, batch.labels, strict=True):
            left, top, right, bottom = (300 * boxes[0]).round().int().tolist()
            if not labels[0] or min(right - left, bottom - top) < 30:
                continue
            white = picture.numpy().mean(axis=2) > 127
            area = (right - left) * (bottom - top)
            inside = white[top:bottom, left:right].sum()
            assert inside > 0.8 * area
            assert white.sum() - inside < 0.2 * area
            sides.append(left + right > 300)
    assert len(sides) > 50
    assert 5 < sum(sides) < len(sides) - 5


def test_evaluation_sees_every_image_once_in_order(splits: dict[str, Split]) -> None:
    split = splits["val"]
    rows = np.arange(len(split.image_ids))
    batches = list(evaluation_batches(split, rows, 4, 2))
    assert [len(b.images) for b in batches] == [4, 4, 1]
    assert np.concatenate([b.rows for b in batches]).tolist() == rows.tolist()


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff\xe0 cut", b"<html>"])
def test_an_image_that_went_bad_is_named(shapes: Path, tmp_path: Path, content: bytes) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    split = open_dataset(root, tmp_path / "store")["train"]
    for path in (root / "train2017").iterdir():
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"image \d+ cannot be decoded"):
        list(evaluation_batches(split, split.trainable, 4, 2))
    with pytest.raises(DataError, match=r"images in a row cannot be decoded, the first .*\.jpg"):
        read_batches(split, PLAN, range(1))
