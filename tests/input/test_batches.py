"""Batches are a function of (seed, step), in every pipeline; bad images are replaced alike."""

import errno
import importlib.util
import os
import re
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ssdctl import files
from ssdctl.config import PrepareConfig
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split
from ssdctl.errors import DataError, DiskError
from ssdctl.input.batch import Batch, LoaderConfig
from ssdctl.input.loader import evaluation_batches
from ssdctl.input.open import open_input
from ssdctl.input.sampler import SampleStream

PLAN = LoaderConfig(seed=4, batch_size=5, threads=2, max_boxes=12)
HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="the dali extra is not installed")
PIPELINES = ["native", pytest.param("dali", marks=needs_dali)]


@pytest.fixture(scope="module")
def splits(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Split]:
    return open_dataset(shapes, tmp_path_factory.mktemp("store"))


@pytest.fixture
def copied(dataset: Path, tmp_path: Path) -> Split:
    """A prepared dataset of its own."""
    return open_dataset(dataset, tmp_path / "store")["train"]


@pytest.fixture
def damaged(copied: Split) -> Split:
    """A prepared dataset of which three images went bad afterwards: cut, replaced, lost."""
    cut, page, lost = (Path(copied.location(int(row))) for row in copied.trainable[[2, 9, 15]])
    cut.write_bytes(cut.read_bytes()[:3000])
    page.write_bytes(b"<html>not found</html>")
    lost.unlink()
    return copied


def read_batches(
    split: Split, plan: LoaderConfig, first: int, last: int, pipeline: str = "native"
) -> list[Batch]:
    """Return copies of a run's batches: the pixel buffers are reused."""
    batches = open_input(pipeline, split, plan).batches(first, last)
    return [batch._replace(images=batch.images.clone()) for batch in batches]


def assert_same(actual: list[Batch], expected: list[Batch], levels: int = 0) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        assert a.bad == b.bad
        for name in ("boxes", "labels", "jitter"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None and y is None) or torch.equal(x, y), name
        assert (a.images.int() - b.images.int()).abs().max() <= levels


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_resumed_run_goes_on_with_its_batches(splits: dict[str, Split], pipeline: str) -> None:
    complete = read_batches(splits["train"], PLAN, 0, 8, pipeline)
    assert_same(complete[3:], read_batches(splits["train"], PLAN, 3, 8, pipeline))
    later = PLAN._replace(first_sample=3 * 5)
    assert_same(complete[3:], read_batches(splits["train"], later, 0, 5, pipeline))


def test_two_ranks_and_accumulation_take_the_same_global_batches(splits: dict[str, Split]) -> None:
    complete = read_batches(splits["train"], PLAN._replace(batch_size=8), 0, 4)
    half = PLAN._replace(batch_size=2, world_size=2, accumulate=2)
    shared = [read_batches(splits["train"], half._replace(rank=r), 0, 4) for r in (0, 1)]
    for step, batch in enumerate(complete):
        parts = [shared[rank][2 * step + part] for part in (0, 1) for rank in (0, 1)]
        assert torch.equal(torch.cat([p.images for p in parts]), batch.images)
        assert torch.equal(torch.cat([p.boxes for p in parts]), batch.boxes)


@pytest.mark.parametrize("accumulate", [1, 3, 6])
def test_batches_last_until_the_next_step(splits: dict[str, Split], accumulate: int) -> None:
    """The caller keeps all micro-batches of a step; none of their buffers may be reused."""
    plan = PLAN._replace(batch_size=1, accumulate=accumulate)
    copies = read_batches(splits["train"], plan, 0, 4)
    batches = open_input("native", splits["train"], plan).batches(0, 4)
    for step in range(4):
        held = [next(batches) for _ in range(accumulate)]
        time.sleep(0.05)  # what is decoded ahead lands meanwhile
        for part, batch in enumerate(held):
            assert torch.equal(batch.images, copies[step * accumulate + part].images)


def test_resizing_alone_is_pillows(splits: dict[str, Split], shapes: Path) -> None:
    split = splits["train"]
    (batch,) = read_batches(split, PLAN._replace(augment="none"), 0, 1)
    assert batch.jitter is None
    for i, row in enumerate(batch.rows):
        with Image.open(shapes / "train2017" / f"{split.image_ids[row]:012d}.jpg") as image:
            expected = np.asarray(image.resize((300, 300), Image.Resampling.BILINEAR))
        assert np.array_equal(batch.images[i].numpy(), expected)
        boxes = split.boxes[split.starts[row] : split.starts[row + 1]]
        assert np.array_equal(batch.boxes[i, : len(boxes)], boxes)


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff\xe0 cut", b"<html>", None])
def test_images_that_all_went_bad_are_named(copied: Split, content: bytes | None) -> None:
    paths = [Path(copied.location(int(row))) for row in copied.trainable]
    for path in paths:
        path.unlink() if content is None else path.write_bytes(content)
    if content is not None:
        with pytest.raises(DataError) as refused:
            list(evaluation_batches(copied, copied.trainable, 4, 2))
        assert str(paths[0]) in str(refused.value)
    with pytest.raises(DataError, match=r"\.jpg"):
        read_batches(copied, PLAN, 0, 1)


@pytest.mark.parametrize("name", ["EIO", "EACCES"])
def test_an_image_that_the_system_refuses_is_replaced_and_not_scored(
    copied: Split, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refused = Path(copied.location(int(copied.trainable[2])))
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == refused:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(files, "RETRY_AFTER_S", ())
    bad = [bad for batch in read_batches(copied, PLAN, 0, 12) for bad in batch.bad]
    assert {b.file for b in bad} == {str(refused)}
    assert os.strerror(getattr(errno, name)) in bad[0].problem
    with pytest.raises(DiskError, match=re.escape(str(refused))):
        list(evaluation_batches(copied, copied.trainable, 4, 1))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_bad_images_are_replaced_alike_by_threads_and_ranks(damaged: Split, pipeline: str) -> None:
    complete = read_batches(damaged, PLAN, 0, 12, pipeline)
    bad_rows = set(damaged.trainable[[2, 9, 15]].tolist())
    order = SampleStream(damaged.trainable, PLAN.seed).samples(0, 100)[0]
    for start, batch in zip(PLAN.positions(0, 12), complete, strict=True):
        for slot, row in enumerate(batch.rows):  # the next good sample of the stream
            assert row == next(r for r in order[start + slot :] if int(r) not in bad_rows)
    met = [bad for batch in complete for bad in batch.bad]
    assert {bad.image_id for bad in met} == set(damaged.image_ids[list(bad_rows)].tolist())
    assert all(bad.problem and bad.file == damaged.location(bad.image_id - 1) for bad in met)
    for threads in (1, 5):
        plan = PLAN._replace(threads=threads)
        assert_same(complete, read_batches(damaged, plan, 0, 12, pipeline))
    assert_same(complete[7:], read_batches(damaged, PLAN, 7, 12, pipeline))
    single = PLAN._replace(batch_size=1, world_size=5)
    ranks = [read_batches(damaged, single._replace(rank=r), 0, 12, pipeline) for r in range(5)]
    for step, batch in enumerate(complete):
        assert [int(rank[step].rows[0]) for rank in ranks] == batch.rows.tolist()
        images = torch.cat([rank[step].images for rank in ranks])
        assert (images.int() - batch.images.int()).abs().max() <= (2 if pipeline == "dali" else 0)


def test_images_that_occur_twice_are_not_tried_for_ever(damaged: Split) -> None:
    bad = damaged.trainable[[2, 9, 15]]
    with pytest.raises(DataError, match="3 images in a row cannot be decoded"):
        read_batches(damaged._replace(trainable=np.repeat(bad, 2)), PLAN, 0, 1)


@needs_dali
@pytest.mark.parametrize("augment", ["ssd", "none"])
def test_dali_is_within_two_levels_of_native(splits: dict[str, Split], augment: str) -> None:
    plan = PLAN._replace(augment=augment)
    native, dali = (read_batches(splits["train"], plan, 0, 6, name) for name in ("native", "dali"))
    assert_same(native, dali, levels=2)


@pytest.mark.parametrize("augment", ["ssd", "ssd-zoom"])
def test_all_kinds_of_stores_give_equal_samples(shapes: Path, tmp_path: Path, augment: str) -> None:
    """Crops are cut at whole pixels of what is stored; boxes refer to them."""
    batches, evaluated, opened = {}, {}, {}
    for name, config in {
        "files": PrepareConfig(pack=False),
        "packed": PrepareConfig(),
        "raw": PrepareConfig(encoding="raw"),
        "shrunk": PrepareConfig(shrink=300),
        "shrunk raw": PrepareConfig(shrink=300, encoding="raw"),
    }.items():
        prepare(shapes, tmp_path / name, config)
        split = opened[name] = open_dataset(shapes, tmp_path / name)["train"]
        assert split.is_raw == (config.encoding == "raw")
        batches[name] = read_batches(split, PLAN._replace(augment=augment), 0, 5)
        evaluated[name] = [b.images.clone() for b in evaluation_batches(split, np.arange(5), 3, 2)]
    for name in ("packed", "raw"):
        assert_same(batches["files"], batches[name])
        assert all(map(torch.equal, evaluated["files"], evaluated[name]))
    shrunk, raw = batches["shrunk"], batches["shrunk raw"]
    assert opened["shrunk"].pixel_sizes.tolist() == opened["shrunk raw"].pixel_sizes.tolist()
    assert opened["shrunk"].pixel_sizes.min(axis=1).max() == 300
    for actual, expected in zip(batches["files"], shrunk, strict=True):
        assert not expected.bad
        assert actual.rows.tolist() == expected.rows.tolist()
        assert augment != "ssd" or (actual.boxes - expected.boxes).abs().max() < 0.03
    assert_same(shrunk, raw, levels=255)
    pixels = [torch.cat([b.images for b in found]).float() for found in (shrunk, raw)]
    assert 0 < (pixels[0] - pixels[1]).abs().mean() < 2  # the loss of JPEG


@settings(max_examples=60, deadline=None)
@given(
    images=st.integers(1, 60),
    batch=st.integers(1, 90),
    world=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 9),
    background=st.integers(0, 20),
)
def test_any_world_size_sees_every_image_once_an_epoch(
    images: int, batch: int, world: int, accumulate: int, seed: int, background: int
) -> None:
    plan = PLAN._replace(batch_size=batch, world_size=world, accumulate=accumulate, seed=seed)
    global_batch = batch * world * accumulate
    steps = -(-3 * (images + background) // global_batch)
    empty = -1 - np.arange(7)  # seven images without objects
    order = SampleStream(np.arange(images) * 3, seed, empty, background)
    seen: dict[int, int] = {}
    for rank in range(world):
        for start in plan._replace(rank=rank).positions(0, steps):
            rows, _ = order.samples(start, batch)
            seen.update((start + i, int(row)) for i, row in enumerate(rows))
    assert sorted(seen) == list(range(steps * global_batch))
    shown = []
    for epoch in range(3):
        rows = [seen[epoch * len(order) + i] for i in range(len(order))]
        assert sorted(row for row in rows if row >= 0) == list(range(0, 3 * images, 3))
        shown += [row for row in rows if row < 0]
    assert len(shown) == 3 * background
    counts = [shown.count(row) for row in empty]
    assert max(counts) - min(counts) <= 1  # all of them equally often


def test_an_image_has_another_view_each_time() -> None:
    """Its random numbers depend on its row and epoch, and it can be shown twice in an epoch."""
    images = np.array([4, 0, 1, 4, 2, 1, 3, 4, 5, 6])  # one occurs three times, one twice
    order = SampleStream(images, 0, np.array([10, 11, 12]), 10)
    assert (len(order), order.num_images) == (20, 10)
    rows, epochs = order.samples(0, 60)
    views = [(row, epoch) for row, epoch in zip(rows.tolist(), epochs.tolist(), strict=True)]
    assert len(set(views)) == 60
    assert sorted(epoch for row, epoch in views if row == 4) == list(range(9))


def test_the_order_depends_on_epoch_and_seed() -> None:
    rows = np.arange(50)
    (first, epoch), (second, next_epoch) = (
        SampleStream(rows, 3).samples(start, 50) for start in (0, 50)
    )
    assert first.tolist() != second.tolist()
    assert first.tolist() != SampleStream(rows, 1).samples(0, 50)[0].tolist()
    assert (set(epoch), set(next_epoch)) == ({0}, {1})


def test_next_batches_are_ready_while_the_device_works(splits: dict[str, Split]) -> None:
    batches = open_input("native", splits["train"], PLAN).batches(0, 50)
    next(batches)
    time.sleep(1.0)  # what a step of the device would take
    start = time.perf_counter()
    next(batches)
    assert time.perf_counter() - start < 0.2
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


def test_memory_stays_flat_over_epochs(splits: dict[str, Split]) -> None:
    peaks = []
    for number, _ in enumerate(open_input("native", splits["train"], PLAN).batches(0, 110)):
        if number in (30, 109):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 8 << 10  # KiB
