"""A store of decoded pixels; tests/input/test_batches.py compares its batches."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ssdctl.config import PrepareConfig
from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split, open_split
from ssdctl.errors import DiskError

SHRINK = 310


def prepared(dataset: Path, store: Path, shrink: int | None = None) -> Split:
    prepare(dataset, store, PrepareConfig(encoding="raw", shrink=shrink))
    return open_split(dataset, store, "train")


def test_pixels_are_a_view_of_the_mapped_file(dataset: Path, tmp_path: Path) -> None:
    split = prepared(dataset, tmp_path / "raw")
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
    split = prepared(dataset, tmp_path / "raw", SHRINK)
    num_bytes = int(3 * split.pixel_sizes.prod(axis=1).sum())
    assert f"{num_bytes / 1e9:.2f} GB" in caplog.text
    written = sum(p.stat().st_size for p in (tmp_path / "raw").glob("images-train-*"))
    assert num_bytes < written < 1.02 * num_bytes + 50_000
    monkeypatch.setattr("ssdctl.data.image_check.free_bytes", lambda _: num_bytes - 1)
    with pytest.raises(DiskError) as error:
        prepared(dataset, tmp_path / "full", SHRINK)
    assert "train" in str(error.value)
    assert "--shrink" in (error.value.hint or "")
    assert not list((tmp_path / "full").glob("images-*"))


def test_an_image_can_be_read_as_a_file(dataset: Path, tmp_path: Path) -> None:
    split = prepared(dataset, tmp_path / "raw")
    with Image.open(io.BytesIO(split.read(2))) as opened:
        np.testing.assert_array_equal(np.asarray(opened), split.decode(2))
    splits = open_dataset(dataset, tmp_path / "raw")
    export_dataset(splits, tmp_path / "out", "coco")
    exported = open_dataset(tmp_path / "out", tmp_path / "again")["train"]
    np.testing.assert_array_equal(exported.decode(2), split.decode(2))
