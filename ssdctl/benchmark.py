"""This machine's figures: how fast it trains and evaluates (benchmark_data: how fast it feeds).

Each function measures a real code path on real images and returns plain figures.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.config import Config
from ssdctl.data import shapes
from ssdctl.data.prepare import open_dataset
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.evaluate.coco_ap import score
from ssdctl.evaluate.detect import DetectOptions, detect_split
from ssdctl.input.loader import Batch, TrainLoader
from ssdctl.input.order import Order
from ssdctl.input.samples import TrainPlan
from ssdctl.model.postprocess import detect
from ssdctl.model.ssd300 import SSD300
from ssdctl.train.optimizer import build_optimizer
from ssdctl.train.setup import choose_precision
from ssdctl.train.step import TrainStep

Figures = dict[str, float | int | str]
MATMUL_SIZE = {"cpu": 2048}
MATMUL_SIZE_ELSEWHERE = 8192
WARMUP_STEPS = 3


def make_shapes(folder: Path) -> dict[str, Split]:
    """A dataset to measure on where the user names none."""
    shapes.generate(folder, num_train=256, num_val=64)
    return open_dataset(folder, folder / "prepared", say=lambda _: None)


def benchmark_train(split: Split, config: Config, seconds: float) -> Figures:
    """Optimizer steps on real images: rate, step time, arithmetic and its share of the peak."""
    device = open_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    model = SSD300(config.model.backbone, len(split.classes) + 1, config.model.extra_norm)
    model = device.place(model).train()
    flops = _train_flops(model, device)
    step = TrainStep(model, build_optimizer(model, config.train), device, config.train, precision)
    size = config.train.batch_size
    threads = config.train.workers or len(os.sched_getaffinity(0))
    batches = _endless(split, config, batch_size=size, threads=threads)
    for batch in itertools.islice(batches, WARMUP_STEPS):
        step([batch], 1e-6)
    device.synchronize()
    steps, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds or steps < WARMUP_STEPS:
        step([next(batches)], 1e-6)
        steps += 1
    device.synchronize()
    spent = time.perf_counter() - start
    achieved = flops * size * steps / spent
    peak = matmul_flops(device, precision)
    return {
        "images_per_second": round(size * steps / spent, 2),
        "step_ms": round(1000 * spent / steps, 2),
        "tflops": round(achieved / 1e12, 4),
        "peak_fraction": round(achieved / peak, 4),
        "peak_tflops": round(peak / 1e12, 4),
        "device": device.label,
        "precision": precision,
        "backbone": config.model.backbone,
        "batch_size": size,
        "peak_memory_bytes": device.peak_memory_bytes(),
    }


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


def matmul_flops(device: Device, precision: str) -> float:
    """What the device reaches on a large square matrix product, in FLOP/s: the practical peak."""
    size = MATMUL_SIZE.get(device.name, MATMUL_SIZE_ELSEWHERE)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a = torch.randn(size, size, device=device.torch_device).to(dtype)
    best = float("inf")
    for _ in range(6):
        device.synchronize()
        start = time.perf_counter()
        a @ a
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _train_flops(model: SSD300, device: Device) -> float:
    """FLOP of forward and backward on one image, counted."""
    with FlopCounterMode(display=False) as counter:
        offsets, logits = model(torch.zeros(1, 3, 300, 300, device=device.torch_device))
        (offsets.sum() + logits.sum()).backward()
    model.zero_grad(set_to_none=True)
    return float(counter.get_total_flops())


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


def _endless(split: Split, config: Config, *, batch_size: int, threads: int) -> Iterator[Batch]:
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
