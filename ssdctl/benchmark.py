"""This machine's figures: how fast it feeds, trains and evaluates.

Each function measures a real code path on real images and returns plain figures.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ssdctl.config import Config
from ssdctl.data import shapes
from ssdctl.data.prepare import open_dataset
from ssdctl.data.store import Split
from ssdctl.input.loader import Batch, TrainLoader, TrainPlan
from ssdctl.input.order import Order
from ssdctl.model.augment import normalise
from ssdctl.model.loss import MultiboxLoss

Figures = dict[str, float | int | str]
WARMUP_STEPS = 3


def make_shapes(folder: Path) -> dict[str, Split]:
    """A dataset to measure on where the user names none."""
    shapes.generate(folder, num_train=256, num_val=64)
    return open_dataset(folder, folder / "prepared", say=lambda _: None)


def benchmark_data(split: Split, config: Config, seconds: float) -> Figures:
    """Images per second of the host stage, and with colour, normalisation and targets added."""
    threads = config.train.workers or len(os.sched_getaffinity(0))
    batches = endless_batches(split, config, batch_size=32, threads=threads)
    host = _rate(batches, seconds, lambda batch: None)
    loss = MultiboxLoss()
    offsets, logits = torch.zeros(32, 4, 8732), torch.zeros(32, len(split.classes) + 1, 8732)

    def finish(batch: Batch) -> None:
        normalise(batch.images, batch.jitter)
        with torch.inference_mode():
            loss(offsets, logits, batch.boxes, batch.labels)

    full = _rate(batches, seconds, finish)
    return {"images_per_second": host, "images_per_second_full": full, "workers": threads}


def endless_batches(
    split: Split, config: Config, *, batch_size: int, threads: int
) -> Iterator[Batch]:
    plan = TrainPlan(
        seed=config.train.seed,
        first_sample=0,
        batch_size=batch_size,
        rank=0,
        world_size=1,
        accumulate=1,
        augment=config.train.augment == "ssd",
        hue_degrees=config.train.hue_degrees,
        threads=threads,
        max_boxes=max(split.most_boxes, 1),
    )
    order = Order(split.trainable, config.train.seed)
    return TrainLoader(split, order, plan).batches(0, 1 << 40)


def _rate(batches: Iterator[Batch], seconds: float, work: Callable[[Batch], None]) -> float:
    for batch in itertools.islice(batches, WARMUP_STEPS):
        work(batch)
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        batch = next(batches)
        work(batch)
        images += len(batch.rows)
    return round(images / (time.perf_counter() - start), 1)
