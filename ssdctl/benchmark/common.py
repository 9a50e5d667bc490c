"""Shared by the benchmarks: a generated dataset, and an endless stream of batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ssdctl.config import Config
from ssdctl.data import shapes
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split
from ssdctl.device.base import Device
from ssdctl.input.batch import Batch
from ssdctl.input.pipelines import open_input
from ssdctl.input.sampler import LoaderConfig

Figures = dict[str, float | int | str]

TRAIN_IMAGES, VAL_IMAGES = 256, 64


def make_shapes(folder: Path) -> dict[str, Split]:
    """Generate a dataset, for measurements without --data."""
    shapes.generate(folder, num_train=TRAIN_IMAGES, num_val=VAL_IMAGES)
    prepare(folder, folder / "prepared", pack=False)
    return open_dataset(folder, folder / "prepared")


def endless_batches(
    split: Split,
    config: Config,
    *,
    batch_size: int,
    threads: int,
    device: Device,
) -> Iterator[Batch]:
    """Return training batches of one rank from the config's pipeline."""
    plan = LoaderConfig.of(config.train, split, batch_size=batch_size, threads=threads)
    source = open_input(
        config.train.pipeline,
        split,
        plan,
        decoder=device.decoder,
        buffer=device.host_buffer,
    )
    return source.batches(0, 1 << 40)
