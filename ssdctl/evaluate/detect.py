"""Run a network over a split and collect its detections.

Every image is seen once, the last partial batch included; an image without detections adds none.
Pictures are decoded some batches ahead. While an accelerator, or a CPU of many cores, runs the
network on a batch, a thread turns the output of the one before into detections: the network alone
sets the pace. On few cores the thread would only compete with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.data.store import Split
from ssdctl.device.base import Device
from ssdctl.errors import NonFiniteError
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.inference.detector import Detector, Output
from ssdctl.input.loader import Batch, evaluation_batches
from ssdctl.model import postprocess
from ssdctl.runtime.map_ahead import map_ahead

Progress = Callable[..., Iterable[Any]]
BATCHES_BEHIND = 2  # outputs that wait for their decoding
FEW_CORES = 4  # on 2, the thread cost 3 to 5% of the rate (benchmarks/RESULTS.md)
# A single picture takes other convolution kernels than a batch does, whose last digits differ: the
# figures would depend on how the images are shared out.
SMALLEST_BATCH = 2


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
    detector = Detector(
        model,
        device,
        precision=options.precision,
        score_threshold=options.score_threshold,
        nms_iou=options.nms_iou,
    )
    rows = rows[split.usable[rows]]
    # Accelerators want one shape for all batches; see also SMALLEST_BATCH.
    is_cpu = device.torch_device.type == "cpu"
    least = SMALLEST_BATCH if is_cpu else options.batch_size
    behind = 0 if is_cpu and torch.get_num_threads() <= FEW_CORES else BATCHES_BEHIND
    batches: Iterable[Batch] = evaluation_batches(split, rows, options.batch_size, options.threads)
    if progress is not None:
        total = -(-len(rows) // options.batch_size)
        batches = progress(batches, total=total, label="detecting", unit="batch")
    was_training = model.training
    model.eval()
    try:
        return merge(list(_found(detector, split, batches, least, behind)))
    finally:
        model.train(was_training)


def _found(
    detector: Detector, split: Split, batches: Iterable[Batch], least: int, behind: int
) -> Iterator[Detections]:
    """The detections of each image, in the order of the batches.

    Args:
        least: Pictures that the network gets at a time, at least.
        behind: How many outputs may wait for the thread that decodes them; 0 = no thread.
    """
    if behind == 0:
        for batch in batches:
            output = detector.forward(_filled(batch.images, least))
            yield from _finish(detector, split, batch.rows, output)
        return
    with ThreadPoolExecutor(1, thread_name_prefix="detect") as pool:
        try:
            outputs = ((b.rows, detector.forward(_filled(b.images, least))) for b in batches)
            finished = map_ahead(
                pool, lambda item: _finish(detector, split, *item), outputs, behind
            )
            yield from itertools.chain.from_iterable(finished)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _filled(images_BHW3: Tensor, least: int) -> Tensor:
    """The pictures, the first one again until there are enough."""
    missing = least - len(images_BHW3)
    if missing <= 0:
        return images_BHW3
    return torch.cat([images_BHW3, images_BHW3[:1].expand(missing, -1, -1, -1)])


def _finish(
    detector: Detector, split: Split, rows: NDArray[np.int64], output: Output
) -> list[Detections]:
    try:
        pictures = detector.finish(Output(*(t[: len(rows)] for t in output)))
    except NonFiniteError as error:
        ids = ", ".join(map(str, split.image_ids[rows[:5]].tolist()))
        more = ", ..." if len(rows) > 5 else ""
        raise NonFiniteError(f"{error} (images {ids}{more})", hint=error.hint) from None
    category_ids = np.array([c.id for c in split.classes], np.int64)
    return [
        _in_pixels(picture, int(split.image_ids[row]), split.sizes[row], category_ids)
        for row, picture in zip(rows, pictures, strict=True)
    ]


def _in_pixels(
    found: postprocess.Detections,
    image_id: int,
    size: NDArray[np.int32],
    category_ids: NDArray[np.int64],
) -> Detections:
    """COCO's terms: left, top, width, height in pixels, not clipped, as the peers have it."""
    ltrb = found.boxes.numpy().astype(np.float64) * np.tile(size, 2)
    return Detections(
        np.full(len(ltrb), image_id, np.int64),
        np.concatenate([ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]], axis=1),
        found.scores.numpy().astype(np.float64),
        category_ids[found.labels.numpy() - 1],
    )


def merge(parts: list[Detections]) -> Detections:
    """The detections of several images, or ranks, as one."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return Detections(empty, np.zeros((0, 4)), np.zeros(0), empty)
    return Detections(*(np.concatenate(column) for column in zip(*parts, strict=True)))
