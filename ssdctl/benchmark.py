"""This machine's figures: how fast it feeds, trains and evaluates.

Each function measures a real code path on real images and returns plain figures.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.config import Config
from ssdctl.data import shapes
from ssdctl.data.prepare import open_dataset
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.evaluate.coco_ap import score
from ssdctl.evaluate.detect import DetectOptions, detect_split
from ssdctl.input.loader import Batch, TrainLoader, TrainPlan
from ssdctl.input.order import Order
from ssdctl.model.augment import normalise
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.postprocess import detect
from ssdctl.model.ssd300 import SSD300

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


def benchmark_evaluate(split: Split, config: Config, seconds: float) -> Figures:
    """Decoding and NMS alone, the whole of detection, and COCO scoring."""
    device = open_device(config.evaluate.device)
    model = SSD300(config.model.backbone, len(split.classes) + 1, config.model.extra_norm)
    model = device.place(model).eval()
    wishes = config.evaluate
    options = DetectOptions(
        wishes.batch_size,
        wishes.precision,
        wishes.workers or len(os.sched_getaffinity(0)),
        wishes.score_threshold,
        wishes.nms_iou,
    )
    start = time.perf_counter()
    found = detect_split(model, split, np.arange(len(split.image_ids)), device, options)
    whole = len(split.image_ids) / (time.perf_counter() - start)
    start = time.perf_counter()
    score(split.annotations, found)
    score_s = time.perf_counter() - start
    return {
        "detect_images_per_second": _decode_rate(device, len(split.classes) + 1, seconds),
        "images_per_second": round(whole, 2),
        "score_s": round(score_s, 4),
        "images": len(split.image_ids),
        "detections": len(found.scores),
    }


def _decode_rate(device: Device, num_classes: int, seconds: float) -> float:
    """Images per second of box decoding with NMS, batch 8, on scores like a trained network's."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randn(8, 4, 8732, generator=generator).to(device.torch_device)
    logits = torch.randn(8, num_classes, 8732, generator=generator)
    logits[:, 0] += 8  # most boxes are background, as in a trained network's output
    logits = logits.to(device.torch_device)
    defaults = default_boxes_cxcywh().to(device.torch_device)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        detect(offsets, logits, defaults, score_threshold=0.05, nms_iou=0.5)
        count += 8
    device.synchronize()
    return round(count / (time.perf_counter() - start), 1)


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
