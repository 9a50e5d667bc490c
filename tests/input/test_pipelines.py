"""Every pipeline gives the same samples; bad images are replaced alike; fake batches have shapes."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import resource
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssdctl import files
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split
from ssdctl.errors import DataError, DiskError
from ssdctl.input.fake import fake_split
from ssdctl.input.loader import Batch, evaluation_batches
from ssdctl.input.pipelines import open_input
from ssdctl.input.sample_stream import SampleStream
from ssdctl.input.samples import LoaderConfig

PLAN = LoaderConfig(4, 0, 5, 0, 1, 1, True, 18.0, 2, 12)
HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
needs_dali = pytest.mark.skipif(not HAS_DALI, reason="the dali extra is not installed")
PIPELINES = ["native", pytest.param("dali", marks=needs_dali)]


@pytest.fixture
def damaged(shapes: Path, tmp_path: Path) -> Split:
    """A prepared dataset of which three images went bad afterwards: cut, replaced, lost."""
    root = tmp_path / "dataset"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    split = open_dataset(root, tmp_path / "store")["train"]
    cut, page, lost = (Path(split.place(int(row))) for row in split.trainable[[2, 9, 15]])
    cut.write_bytes(cut.read_bytes()[:3000])
    page.write_bytes(b"<html>not found</html>")
    lost.unlink()
    return split


def read_batches(
    split: Split, plan: LoaderConfig, first: int, last: int, pipeline: str = "native"
) -> list[Batch]:
    batches = open_input(pipeline, split, plan).batches(first, last)
    return [batch._replace(images=batch.images.clone()) for batch in batches]


def assert_same(actual: list[Batch], expected: list[Batch], levels: int = 0) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        assert a.bad == b.bad
        for name in ("boxes", "labels", "jitter"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert (a.images.int() - b.images.int()).abs().max() <= levels


@pytest.mark.parametrize("name", ["EIO", "EACCES"])
def test_an_image_that_the_system_refuses_is_replaced_and_not_scored(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    split = open_dataset(root, tmp_path / "store")["train"]
    refused = Path(split.place(int(split.trainable[2])))
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == refused:
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(files, "RETRY_AFTER_S", ())
    bad = [bad for batch in read_batches(split, PLAN, 0, 12) for bad in batch.bad]
    assert {b.file for b in bad} == {str(refused)}
    assert os.strerror(getattr(errno, name)) in bad[0].problem
    with pytest.raises(DiskError, match=re.escape(str(refused))):
        list(evaluation_batches(split, split.trainable, 4, 1))


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.process
def test_bad_images_are_replaced_alike_whatever_the_threads_and_ranks(
    damaged: Split, pipeline: str
) -> None:
    complete = read_batches(damaged, PLAN, 0, 12, pipeline)
    bad_rows = set(damaged.trainable[[2, 9, 15]].tolist())
    assert not bad_rows & {int(row) for batch in complete for row in batch.rows}
    met = [bad for batch in complete for bad in batch.bad]
    assert {bad.image_id for bad in met} == set(damaged.image_ids[list(bad_rows)].tolist())
    assert all(bad.problem and bad.file == damaged.place(bad.image_id - 1) for bad in met)
    for threads in (1, 5):
        assert_same(
            complete, read_batches(damaged, PLAN._replace(threads=threads), 0, 12, pipeline)
        )
    assert_same(complete[7:], read_batches(damaged, PLAN, 7, 12, pipeline))
    ranks = [
        read_batches(damaged, PLAN._replace(batch_size=1, world_size=5, rank=rank), 0, 12, pipeline)
        for rank in range(5)
    ]
    for step, batch in enumerate(complete):
        assert [int(rank[step].rows[0]) for rank in ranks] == batch.rows.tolist()
        images = torch.cat([rank[step].images for rank in ranks])
        assert (images.int() - batch.images.int()).abs().max() <= (2 if pipeline == "dali" else 0)


@pytest.mark.process
def test_a_replacement_is_the_next_good_sample_of_the_stream(damaged: Split) -> None:
    places = PLAN.positions(0, 12)
    rows = SampleStream(damaged.trainable, PLAN.seed).samples(0, 100).row
    bad_rows = set(damaged.trainable[[2, 9, 15]].tolist())
    for start, batch in zip(places, read_batches(damaged, PLAN, 0, 12), strict=True):
        for slot, row in enumerate(batch.rows):
            expected = next(int(r) for r in rows[start + slot :] if int(r) not in bad_rows)
            assert int(row) == expected


def test_a_run_without_any_readable_image_ends(damaged: Split) -> None:
    for row in damaged.trainable:
        Path(damaged.place(int(row))).unlink(missing_ok=True)
    with pytest.raises(DataError, match="images in a row cannot be decoded"):
        read_batches(damaged, PLAN, 0, 1)


@needs_dali
@pytest.mark.parametrize("augment", [True, False])
def test_dali_gives_the_native_batches_within_two_levels(shapes: Path, augment: bool) -> None:
    split = open_dataset(shapes, shapes / "prepared")["train"]
    plan = PLAN._replace(augment=augment)
    native = [b._replace(jitter=torch.zeros(1)) for b in read_batches(split, plan, 0, 6)]
    dali = [b._replace(jitter=torch.zeros(1)) for b in read_batches(split, plan, 0, 6, "dali")]
    assert_same(native, dali, levels=2)


@needs_dali
def test_dali_resumed_in_mid_epoch_continues_with_the_same_batches(shapes: Path) -> None:
    split = open_dataset(shapes, shapes / "prepared")["train"]
    assert_same(
        read_batches(split, PLAN, 0, 8, "dali")[3:], read_batches(split, PLAN, 3, 8, "dali")
    )


@pytest.mark.process
def test_a_packed_and_a_shrunk_store_give_the_same_samples(shapes: Path, tmp_path: Path) -> None:
    """Crops are cut at whole pixels of what is stored; boxes refer to them."""
    batches = {}
    for name, pack, shrink in (
        ("files", False, None),
        ("packed", True, None),
        ("shrunk", True, 300),
    ):
        prepare(shapes, tmp_path / name, pack=pack, shrink=shrink)
        split = open_dataset(shapes, tmp_path / name)["train"]
        batches[name] = read_batches(split, PLAN, 0, 5)
    assert_same(batches["files"], batches["packed"])
    for actual, expected in zip(batches["files"], batches["shrunk"], strict=True):
        assert not expected.bad
        assert actual.rows.tolist() == expected.rows.tolist()
        assert (actual.boxes - expected.boxes).abs().max() < 0.03


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 7),
    world=st.integers(1, 5),
    accumulate=st.integers(1, 3),
    seed=st.integers(0, 9),
)
@pytest.mark.process
def test_any_world_size_sees_every_image_once_an_epoch(
    batch: int, world: int, accumulate: int, seed: int
) -> None:
    images = 23
    plan = PLAN._replace(batch_size=batch, world_size=world, accumulate=accumulate, seed=seed)
    steps = -(-3 * images // plan.global_batch)
    order = SampleStream(np.arange(images), seed)
    seen: dict[int, int] = {}
    for rank in range(world):
        for start in plan._replace(rank=rank).positions(0, steps):
            rows = order.samples(start, batch).row
            seen.update((start + i, int(row)) for i, row in enumerate(rows))
    assert sorted(seen) == list(range(steps * plan.global_batch))
    for epoch in range(3):
        assert sorted(seen[epoch * images + i] for i in range(images)) == list(range(images))


def test_next_batches_are_ready_while_the_device_works(shapes: Path) -> None:
    split = open_dataset(shapes, shapes / "prepared")["train"]
    batches = open_input("native", split, PLAN).batches(0, 50)
    next(batches)
    time.sleep(1.0)  # what a step of the device would take
    start = time.perf_counter()
    next(batches)
    assert time.perf_counter() - start < 0.2
    batches.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("decode")]


@pytest.mark.process
def test_memory_stays_flat_over_epochs(shapes: Path) -> None:
    split = open_dataset(shapes, shapes / "prepared")["train"]
    batches = open_input("native", split, PLAN).batches(0, 110)
    peaks = []
    for number, _ in enumerate(batches):
        if number in (30, 109):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 8 << 10  # KiB


def test_fake_batches_have_the_shapes_of_real_ones(shapes: Path) -> None:
    split = open_dataset(shapes, shapes / "prepared")["train"]
    (real,) = read_batches(split, PLAN, 0, 1)
    for source in (split, fake_split()):
        fakes = list(open_input("native", source, PLAN, fake=True).batches(0, 3))
        assert len(fakes) == 3
        for fake in fakes:
            for name in ("images", "boxes", "labels", "jitter"):
                actual, expected = getattr(fake, name), getattr(real, name)
                assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), name
            real_boxes = fake.boxes[fake.labels > 0]
            assert (real_boxes[:, 2:] > real_boxes[:, :2]).all()
            assert real_boxes.max() <= 1
            assert int(fake.labels.max()) <= len(source.classes)
