"""A store of decoded pixels gives the batches of a JPEG store, except for the loss of JPEG."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.image_check import Encoding
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split, open_split
from ssdctl.errors import DiskError
from ssdctl.input.batch import Batch
from ssdctl.input.loader import TrainLoader, evaluation_batches
from ssdctl.input.sampler import LoaderConfig, SampleStream

SHRINK = 310
PLAN = LoaderConfig(seed=3, batch_size=6, threads=2, max_boxes=12)


def prepared(dataset: Path, store: Path, encoding: Encoding, shrink: int | None = None) -> Split:
    prepare(dataset, store, PrepareConfig(encoding=encoding, shrink=shrink))
    return open_split(dataset, store, "train")


def train_batches(split: Split, augment: str = "ssd") -> list[Batch]:
    plan = PLAN._replace(augment=augment)
    batches = TrainLoader(split, SampleStream(split.trainable, plan.seed), plan).batches(0, 6)
    return [batch._replace(images=batch.images.clone()) for batch in batches]


def differences(ours: list[Batch], others: list[Batch]) -> float:
    """Return the mean difference of the pixels, in levels; everything else must be equal."""
    levels = []
    for a, b in zip(ours, others, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
        assert a.bad == b.bad == ()
        for name in ("boxes", "labels", "jitter"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        levels.append((a.images.int() - b.images.int()).abs().float().mean())
    return float(torch.stack(levels).mean())


@pytest.mark.parametrize("augment", ["ssd", "ssd-zoom"])
def test_without_shrinking_batches_are_equal(dataset: Path, tmp_path: Path, augment: str) -> None:
    raw = prepared(dataset, tmp_path / "raw", "raw")
    encoded = prepared(dataset, tmp_path / "jpeg", "jpeg")
    assert raw.is_raw
    assert not encoded.is_raw
    assert differences(train_batches(raw, augment), train_batches(encoded, augment)) == 0
    rows = np.arange(5)
    for a, b in zip(
        evaluation_batches(raw, rows, 3, 2), evaluation_batches(encoded, rows, 3, 2), strict=True
    ):
        assert torch.equal(a.images, b.images)


def test_shrunk_batches_differ_by_the_loss_of_jpeg(dataset: Path, tmp_path: Path) -> None:
    raw = prepared(dataset, tmp_path / "raw", "raw", SHRINK)
    encoded = prepared(dataset, tmp_path / "jpeg", "jpeg", SHRINK)
    assert raw.pixel_sizes.tolist() == encoded.pixel_sizes.tolist()
    assert raw.pixel_sizes.min(axis=1).max() == SHRINK
    assert 0 < differences(train_batches(raw), train_batches(encoded)) < 2


def test_pixels_are_a_view_of_the_mapped_file(dataset: Path, tmp_path: Path) -> None:
    split = prepared(dataset, tmp_path / "raw", "raw")
    pixels = split.decode(3, rows=10)
    assert not pixels.flags.writeable
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".arrow")
    ]
    address = pixels.__array_interface__["data"][0]
    assert any(start <= address < end for start, end in ranges)
    with Image.open(dataset / "train2017/000000000004.jpg") as opened:
        np.testing.assert_array_equal(pixels, np.asarray(opened.convert("RGB")))


def test_the_size_is_reported_before_it_is_written(
    dataset: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    split = prepared(dataset, tmp_path / "raw", "raw", SHRINK)
    num_bytes = int(3 * split.pixel_sizes.prod(axis=1).sum())
    assert f"{num_bytes / 1e9:.2f} GB" in caplog.text
    written = sum(p.stat().st_size for p in (tmp_path / "raw").glob("images-train-*"))
    assert num_bytes < written < 1.02 * num_bytes + 50_000
    monkeypatch.setattr("ssdctl.data.image_check_jobs.free_bytes", lambda _: num_bytes - 1)
    with pytest.raises(DiskError) as error:
        prepared(dataset, tmp_path / "full", "raw", SHRINK)
    assert "train" in str(error.value)
    assert "--shrink" in (error.value.hint or "")
    assert not list((tmp_path / "full").glob("images-*"))


def test_an_image_can_be_read_as_a_file(dataset: Path, tmp_path: Path) -> None:
    split = prepared(dataset, tmp_path / "raw", "raw")
    with Image.open(io.BytesIO(split.read(2))) as opened:
        np.testing.assert_array_equal(np.asarray(opened), split.decode(2))
    splits = open_dataset(dataset, tmp_path / "raw")
    export_dataset(splits, tmp_path / "out", "coco")
    exported = open_dataset(tmp_path / "out", tmp_path / "again")["train"]
    np.testing.assert_array_equal(exported.decode(2), split.decode(2))
