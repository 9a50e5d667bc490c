"""Run a network over a split and collect its detections.

Every image is seen once, the last partial batch included; an image without detections adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.data.store import Split
from ssdctl.device.base import Device
from ssdctl.errors import NonFiniteError
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.input.loader import Batch, evaluation_batches
from ssdctl.model.augment import normalise
from ssdctl.model.postprocess import detect

Progress = Callable[..., Iterable[Any]]


class DetectOptions(NamedTuple):
    """How detections are made."""

    batch_size: int
    precision: str  # bf16, fp16 or fp32
    threads: int
    score_threshold: float = 0.05
    nms_iou: float = 0.5


def detect_split(
    model: nn.Module,
    split: Split,
    rows: NDArray[np.int64],
    device: Device,
    options: DetectOptions,
    progress: Progress | None = None,
) -> Detections:
    """The detections on some images of a split; an image that does not open has none.

    Args:
        model: The network, on the device; it is left in the mode it came in.
        split: The images.
        rows: Which of them.
        device: Where the network is.
        options: See `DetectOptions`.
        progress: Wraps the iteration over batches (`total=`, `label=`, `unit=`).

    Raises:
        NonFiniteError: The network's output is NaN or infinite.
        DataError: An image cannot be decoded.
    """
    defaults = default_boxes_cxcywh().to(device.torch_device)
    category_ids = np.array([c.id for c in split.classes], np.int64)
    rows = rows[split.usable[rows]]
    found: list[Detections] = []
    was_training = model.training
    model.eval()
    batches: Iterable[Batch] = evaluation_batches(split, rows, options.batch_size, options.threads)
    if progress is not None:
        total = -(-len(rows) // options.batch_size)
        batches = progress(batches, total=total, label="detecting", unit="batch")
    try:
        with torch.inference_mode():
            for batch in batches:
                images = normalise(batch.images.to(device.torch_device))
                with device.autocast(options.precision):
                    offsets, logits = model(images)
                if not bool(torch.isfinite(logits).all() & torch.isfinite(offsets).all()):
                    ids = split.image_ids[batch.rows].tolist()
                    raise NonFiniteError(
                        f"the network's output is NaN or infinite (images {ids})",
                        hint="the weights went bad in training: evaluate an earlier checkpoint",
                    )
                pictures = detect(
                    offsets,
                    logits,
                    defaults,
                    score_threshold=options.score_threshold,
                    nms_iou=options.nms_iou,
                )
                for row, picture in zip(batch.rows, pictures, strict=True):
                    boxes = _pixels(picture.boxes.cpu().numpy(), split.sizes[row])
                    found.append(
                        Detections(
                            np.full(len(boxes), split.image_ids[row], np.int64),
                            boxes,
                            picture.scores.cpu().numpy().astype(np.float64),
                            category_ids[picture.labels.cpu().numpy() - 1],
                        )
                    )
    finally:
        model.train(was_training)
    return merge(found)


def merge(parts: list[Detections]) -> Detections:
    """The detections of several images, or ranks, as one."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return Detections(empty, np.zeros((0, 4)), np.zeros(0), empty)
    return Detections(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _pixels(boxes: NDArray[np.float32], size: NDArray[np.int32]) -> NDArray[np.float64]:
    """ltrb in fractions -> left, top, width, height in pixels. Not clipped (FACTS 8)."""
    ltrb = boxes.astype(np.float64) * np.tile(size, 2)
    return np.concatenate([ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]], axis=1)
