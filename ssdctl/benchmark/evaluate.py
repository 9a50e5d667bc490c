"""Measure evaluation: network, detection, latency of one image, scoring at COCO's size."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.benchmark.common import Figures
from ssdctl.boxes.default_boxes import BOXES_PER_CELL, default_boxes_cxcywh
from ssdctl.config import Config
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.evaluation.coco_ap import run_scoring
from ssdctl.evaluation.detect import DetectOptions, detect_split
from ssdctl.evaluation.ground_truth import read_ground_truth
from ssdctl.evaluation.synthetic import NUM_BOXES, NUM_DETECTIONS, NUM_IMAGES, make_split
from ssdctl.inference.detector import Detector
from ssdctl.input.loader import evaluation_batches
from ssdctl.model.postprocess import detect
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.cores import usable_cores

DETECT_BATCH = 8
ROUNDS = 5
MIN_BATCHES = 3  # per round
MIN_REQUESTS = 10  # of the latency at batch 1
MAX_CANDIDATES = 300  # per image
PERCENTILES = (50, 90, 99)


def benchmark_evaluate(
    split: Split, config: Config, seconds: float, *, score_images: int = NUM_IMAGES
) -> Figures:
    """Measure evaluation on this machine with random weights.

    Args:
        split: Real images.
        config: Its `evaluate` and `model` tables.
        seconds: Length of each measurement.
        score_images: Images of the split that is scored; its detections are in proportion.

    Returns:
        Rates in images per second, latencies in ms, times in s: `forward_` is only the network, on
        pixels in memory; `images_per_second` is all from encoded images to detections.
    """
    settings = config.evaluate
    device = open_device(settings.device)
    model = SSD300(config.model.backbone, len(split.classes) + 1, config.model.extra_norm)
    model = device.place(model).eval()
    threads = settings.workers or usable_cores()
    precision = "fp32" if settings.precision == "auto" else settings.precision
    options = DetectOptions.of(settings, precision, threads)
    detector = Detector(model, device, options.detector)
    size = settings.batch_size
    rows = np.resize(np.nonzero(split.usable)[0], size)
    pixels = next(iter(evaluation_batches(split, rows, size, threads))).images.clone()
    _suppress_objects(model, detector.forward(pixels).logits.clone())
    forward, total = _interleaved_rates(
        lambda: detector.forward(pixels),
        lambda rows: detect_split(model, split, rows, device, options),
        split,
        size,
        seconds,
        device,
    )
    return {
        "detect_images_per_second": round(detect_rate(device, len(split.classes) + 1, seconds), 1),
        "images_per_second": round(statistics.median(total), 2),
        "forward_images_per_second": round(statistics.median(forward), 2),
        "network_fraction": round(
            statistics.median(w / f for w, f in zip(total, forward, strict=True)), 4
        ),
        **_latencies(split, detector, seconds, device),
        **_scoring(score_images),
        "device": device.label,
        "precision": precision,
        "backbone": config.model.backbone,
        "batch_size": size,
    }


def _interleaved_rates(
    forward: Callable[[], Any],
    evaluate: Callable[[NDArray[np.int64]], Any],
    split: Split,
    batch_size: int,
    seconds: float,
    device: Device,
) -> tuple[list[float], list[float]]:
    """Measure the network and the whole evaluation in turn, so that a slow moment affects both.

    The evaluation runs over full batches, so that the rates are comparable.
    """
    each = _seconds_each(forward, seconds / ROUNDS, device)
    num_batches = max(int(seconds / ROUNDS / each), MIN_BATCHES)
    rows = np.resize(np.nonzero(split.usable)[0], num_batches * batch_size)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(num_batches):
            forward()
        device.synchronize()
        between = time.perf_counter()
        evaluate(rows)
        end = time.perf_counter()
        rates[0].append(len(rows) / (between - start))
        rates[1].append(len(rows) / (end - between))
    return rates


def _suppress_objects(model: SSD300, logits_BCN: Tensor) -> None:
    """Raise the background score as in a trained network, to some hundred candidates per image.

    Random weights detect objects in every default box, or in none.
    """
    logits, shift = logits_BCN.float().cpu(), 0
    while (logits.softmax(dim=1)[:, 1:] > 0.05).sum() > MAX_CANDIDATES * len(logits):
        logits[:, 0] += 1
        shift += 1
    with torch.no_grad():
        for head, shapes in zip(model.class_heads, BOXES_PER_CELL, strict=True):
            assert isinstance(head, nn.Conv2d)
            assert head.bias is not None
            head.bias[:shapes] += shift  # channels are class-major


def detect_rate(device: Device, num_classes: int, seconds: float) -> float:
    """Return images per second of softmax, decoding and NMS, on scores like a trained network's."""
    generator = torch.Generator().manual_seed(0)
    offsets = torch.randn(DETECT_BATCH, 4, 8732, generator=generator).to(device.torch_device)
    logits = torch.randn(DETECT_BATCH, num_classes, 8732, generator=generator)
    logits[:, 0] += 8  # most boxes are background, as in a trained network's output
    logits = logits.to(device.torch_device)
    defaults = default_boxes_cxcywh().to(device.torch_device)

    def once() -> Any:
        return detect(offsets, logits, defaults, score_threshold=0.05, nms_iou=0.5)

    return DETECT_BATCH / _seconds_each(once, seconds, device)


def _latencies(split: Split, detector: Detector, seconds: float, device: Device) -> Figures:
    """Measure from one encoded image to its detections, without decoding ahead."""
    usable = np.nonzero(split.usable)[0]
    spent: list[float] = []
    pictures = _one_by_one(split, usable)
    detector(next(pictures))  # the first one initialises the kernels
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent) < MIN_REQUESTS:
        start = time.perf_counter()
        detector(next(pictures))
        device.synchronize()
        spent.append(1000 * (time.perf_counter() - start))
    figures: Figures = {"latency_requests": len(spent)}
    for percent in PERCENTILES:
        figures[f"latency_p{percent}_ms"] = round(float(np.percentile(spent, percent)), 2)
    return figures


def _one_by_one(split: Split, rows: np.ndarray[Any, Any]) -> Iterator[Tensor]:
    number = 0
    while True:
        row = rows[number % len(rows)]
        yield next(iter(evaluation_batches(split, np.array([row]), 1, 1))).images
        number += 1


def _scoring(num_images: int) -> Figures:
    """Measure the scoring of a synthetic split."""
    share = num_images / NUM_IMAGES
    with tempfile.TemporaryDirectory(prefix="ssdctl-benchmark-") as folder:
        path = Path(folder) / "annotations.json"
        detections = make_split(
            path,
            num_images=num_images,
            num_boxes=max(int(NUM_BOXES * share), 1),
            num_detections=max(int(NUM_DETECTIONS * share), 3),
        )
        start = time.perf_counter()
        run_scoring(read_ground_truth(path), detections)
        spent = time.perf_counter() - start
    return {
        "score_s": round(spent, 4),
        "score_images": num_images,
        "score_detections": len(detections.scores),
    }


def _seconds_each(work: Callable[[], Any], seconds: float, device: Device) -> float:
    work()
    device.synchronize()
    count, start = 0, time.perf_counter()
    while count < 2 or time.perf_counter() - start < seconds:
        work()
        count += 1
    device.synchronize()
    return (time.perf_counter() - start) / count
