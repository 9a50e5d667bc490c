"""Measure evaluation: images per second, detection alone, scoring at COCO's size."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.benchmark.data import Measurements
from ssdctl.benchmark.train import timed
from ssdctl.boxes import BOXES_PER_CELL, default_boxes_cxcywh
from ssdctl.config import Config
from ssdctl.data.annotations import Annotations, ClassName
from ssdctl.data.store import Split
from ssdctl.device import Device, opened_device
from ssdctl.distributed import SINGLE_PROCESS
from ssdctl.evaluation.coco_ap import Detections, run_scoring
from ssdctl.evaluation.detect import detect as detect_split
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.input.loader import evaluation_batches
from ssdctl.model.postprocess import detect
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.system import usable_cores

WIDTH, HEIGHT = 640, 480
# val2017: 5,000 images, 36,781 boxes of 80 classes; an SSD300 gives about 111 detections per image.
NUM_IMAGES, NUM_BOXES, NUM_CLASSES, NUM_DETECTIONS = 5000, 36_781, 80, 554_000
DETECT_BATCH = 8
MIN_BATCHES = 3
MAX_CANDIDATES = 300  # per image


def benchmark_evaluate(
    split: Split, config: Config, seconds: float, *, score_images: int = NUM_IMAGES
) -> Measurements:
    """Measure evaluation on this machine with random weights, each part for some seconds.

    Args:
        score_images: Images of the split that is scored; its detections are in proportion.

    Returns:
        `images_per_second` from encoded images to detections, `network_images_per_second` of the
        network alone, `detect_images_per_second` of softmax, decoding and NMS, and `score_s`, the
        seconds of scoring.
    """
    with opened_device(config.evaluate.device, SINGLE_PROCESS) as device:
        return _measure(split, config, seconds, score_images, device)


def _measure(
    split: Split, config: Config, seconds: float, score_images: int, device: Device
) -> Measurements:
    settings = config.evaluate
    model = SSD300(config.model.backbone, len(split.classes) + 1, config.model.extra_norm)
    model = device.place(model).eval()
    threads = settings.workers or usable_cores()
    precision = "fp32" if settings.precision == "auto" else settings.precision
    thresholds = settings.score_threshold, settings.nms_iou
    detector = Detector(model, device, DetectorConfig(precision, *thresholds))
    size = settings.batch_size
    rows = np.resize(np.nonzero(split.usable)[0], size)
    pixels = next(iter(evaluation_batches(split, rows, size, threads))).images.clone()
    suppress_objects(model, detector.forward(pixels)[1].clone())
    forward_s = _seconds_each(lambda: detector.forward(pixels), seconds, device)
    num_batches = max(int(seconds / forward_s), MIN_BATCHES)  # full ones
    rows = np.resize(np.nonzero(split.usable)[0], num_batches * size)
    start = time.perf_counter()
    detect_split(detector, split, rows, batch_size=size, threads=threads)
    total_s = time.perf_counter() - start
    return {
        "detect_images_per_second": round(detect_rate(device, len(split.classes) + 1, seconds), 1),
        "network_images_per_second": round(size / forward_s, 2),
        "images_per_second": round(num_batches * size / total_s, 2),
        **_scoring(score_images),
        "device": device.label,
        "precision": precision,
        "backbone": config.model.backbone,
        "batch_size": size,
    }


def suppress_objects(model: SSD300, logits_BCN: Tensor) -> None:
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
    work = functools.partial(detect, offsets, logits, defaults)
    return DETECT_BATCH / _seconds_each(work, seconds, device)


def _scoring(num_images: int) -> Measurements:
    share = num_images / NUM_IMAGES
    truth, detections = make_split(
        num_images, max(int(NUM_BOXES * share), 1), max(int(NUM_DETECTIONS * share), 3)
    )
    start = time.perf_counter()
    run_scoring(truth, detections)
    return {
        "score_s": round(time.perf_counter() - start, 4),
        "score_images": num_images,
        "score_detections": len(detections.scores),
    }


def _seconds_each(work: Callable[[], Any], seconds: float, device: Device) -> float:
    work()
    times, spent = timed(work, seconds, wait=device.synchronize, is_any=bool)
    return spent / times


def make_split(
    num_images: int = NUM_IMAGES, num_boxes: int = NUM_BOXES, num_detections: int = NUM_DETECTIONS
) -> tuple[Annotations, Detections]:
    """Return synthetic annotations and detections of them.

    A third of the detections are near an object, at different distances, most of them of its class;
    the others are anywhere, with low scores, like a detector's.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(0, num_images, num_boxes)
    labels = rng.integers(1, NUM_CLASSES + 1, num_boxes)
    objects = _random_boxes(rng, num_boxes)
    truth = Annotations(
        folder=Path(),
        origin=Path("synthetic"),
        image_ids=np.arange(num_images),
        file_names=[f"{i}.jpg" for i in range(num_images)],
        sizes=np.tile([WIDTH, HEIGHT], (num_images, 1)),
        classes=[ClassName(c, f"class {c}") for c in range(1, NUM_CLASSES + 1)],
        ids=np.arange(1, num_boxes + 1),
        rows=rows.astype(np.int32),
        labels=labels.astype(np.int32),
        boxes=objects,
        areas=objects[:, 2] * objects[:, 3],
        is_crowd=np.arange(1, num_boxes + 1) % 100 == 0,
    )
    source = rng.integers(0, num_boxes, num_detections)
    is_near = rng.random(num_detections) < 1 / 3
    noise = rng.normal(0, rng.choice([0.05, 0.15, 0.4], (num_detections, 1)), (num_detections, 4))
    near = objects[source] + noise * objects[source][:, [2, 3, 2, 3]]
    boxes = np.where(is_near[:, None], near.round(2), _random_boxes(rng, num_detections))
    boxes[:, 2:] = np.maximum(boxes[:, 2:], 1)
    ids = np.where(is_near, rows[source], rng.integers(0, num_images, num_detections))
    is_right = is_near & (rng.random(num_detections) < 0.7)
    others = rng.integers(1, NUM_CLASSES + 1, num_detections)
    classes = np.where(is_right, labels[source], others)
    scores = 0.05 + 0.95 * rng.beta(np.where(is_near, 1, 0.5), np.where(is_near, 2, 8))
    order = np.argsort(ids, kind="stable")
    return truth, Detections(ids[order], boxes[order], scores[order], classes[order])


def _random_boxes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    size = np.exp(rng.uniform(np.log(8), np.log(400), (count, 2)))
    size = np.minimum(size, [WIDTH, HEIGHT])
    corner = rng.uniform(0, 1, (count, 2)) * ([WIDTH, HEIGHT] - size)
    return np.concatenate([corner, size], axis=1).round(2)
