"""Run a network over a split and collect its detections.

Every image is detected once, including the last partial batch. Images are decoded some batches
ahead. On an accelerator, or a CPU with many cores, a thread decodes the output of one batch while
the network runs on the next; on few cores the thread would only compete with the network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.config.sections.evaluate import EvaluateConfig
from ssdctl.data.store import Split
from ssdctl.device.base import Device
from ssdctl.errors import NonFiniteError
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.evaluation.validation_loss import ValidationLoss
from ssdctl.inference.detector import Detector, DetectorBackend, DetectorConfig, Output
from ssdctl.input.batch import Batch
from ssdctl.input.loader import evaluation_batches
from ssdctl.model import postprocess
from ssdctl.runtime.map_ahead import map_ahead
from ssdctl.runtime.progress import Progress

MAX_PENDING = 2  # outputs that wait to be decoded
FEW_CORES = 4  # on 2, the thread cost 3 to 5% of the rate (benchmarks/RESULTS.md)
# A single picture uses other convolution kernels than a batch, and their last digits differ: the
# figures would depend on the distribution of the images over ranks.
MIN_BATCH = 2


class DetectOptions(NamedTuple):
    """Settings of the detection."""

    batch_size: int
    threads: int
    detector: DetectorConfig

    @classmethod
    def of(cls, settings: EvaluateConfig, precision: str, threads: int) -> DetectOptions:
        """Return the options of the table `evaluate`."""
        detector = DetectorConfig(precision, settings.score_threshold, settings.nms_iou)
        return cls(settings.batch_size, threads, detector)


def detect_split(
    model: nn.Module,
    split: Split,
    rows: NDArray[np.int64],
    device: Device,
    options: DetectOptions,
    progress: Progress | None = None,
    losses: ValidationLoss | None = None,
) -> Detections:
    """Return the detections on some images of a split; an image that cannot be opened has none.

    Args:
        model: The network, on the device; its mode is restored.
        split: The images.
        rows: The rows of the images to detect on.
        device: The device of the network.
        options: The settings.
        progress: Wraps the iteration over batches (`total=`, `label=`, `unit=`).
        losses: Adds up the losses of the pictures, if given.

    Raises:
        NonFiniteError: The network's output is NaN or infinite.
        DataError: An image cannot be decoded.
    """
    detector = Detector(model, device, options.detector)
    was_training = model.training
    model.eval()
    try:
        return detect_with(detector, split, rows, device, options, progress, losses=losses)
    finally:
        model.train(was_training)


def detect_with(
    detector: DetectorBackend,
    split: Split,
    rows: NDArray[np.int64],
    device: Device,
    options: DetectOptions,
    progress: Progress | None = None,
    category_ids: NDArray[np.int64] | None = None,
    losses: ValidationLoss | None = None,
) -> Detections:
    """Do what `detect_split` does, with any detector.

    Args:
        category_ids: The category id of each class of the network; None: the split's, in order.
        losses: Needs PyTorch's detector.
    """
    rows = rows[split.usable[rows]]
    # Accelerators need one shape for all batches; see also MIN_BATCH.
    is_cpu = device.torch_device.type == "cpu"
    min_batch = MIN_BATCH if is_cpu else options.batch_size
    has_few_cores = is_cpu and torch.get_num_threads() <= FEW_CORES
    # The end of a lazy device's graph ends the graphs of all threads, also half-recorded ones.
    is_lazy = device.execution == "lazy"
    max_pending = 0 if has_few_cores or is_lazy else MAX_PENDING
    batches: Iterable[Batch] = evaluation_batches(
        split,
        rows,
        options.batch_size,
        options.threads,
        max_boxes=1 if losses is None else max(split.most_boxes, 1),
    )
    if progress is not None:
        total = -(-len(rows) // options.batch_size)
        batches = progress(batches, total=total, label="detecting", unit="batch")
    if category_ids is None:
        category_ids = np.array([c.id for c in split.classes], np.int64)

    def forward(batch: Batch) -> tuple[Tensor, ...]:
        output = detector.forward(_padded(batch.images, min_batch))
        if losses is not None:
            assert isinstance(output, Output)
            losses.add(output, batch)
        return output

    return merge(
        list(_image_detections(detector, forward, split, category_ids, batches, max_pending))
    )


def _image_detections(
    detector: DetectorBackend,
    forward: Callable[[Batch], tuple[Tensor, ...]],
    split: Split,
    category_ids: NDArray[np.int64],
    batches: Iterable[Batch],
    max_pending: int,
) -> Iterator[Detections]:
    """Yield the detections of each image, in the order of the batches.

    Args:
        forward: Runs the network on a batch; the output may have more pictures than the batch.
        max_pending: Maximum number of outputs that wait for the decoding thread; 0 = no thread.
    """
    if max_pending == 0:
        for batch in batches:
            yield from _finish(detector, split, category_ids, batch.rows, forward(batch))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="detect") as pool:
        try:
            outputs = ((batch.rows, forward(batch)) for batch in batches)
            finished = map_ahead(
                pool,
                lambda item: _finish(detector, split, category_ids, *item),
                outputs,
                max_pending,
            )
            yield from itertools.chain.from_iterable(finished)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _padded(images_BHW3: Tensor, min_batch: int) -> Tensor:
    """Repeat the first picture until there are enough."""
    missing = min_batch - len(images_BHW3)
    if missing <= 0:
        return images_BHW3
    return torch.cat([images_BHW3, images_BHW3[:1].expand(missing, -1, -1, -1)])


def _finish(
    detector: DetectorBackend,
    split: Split,
    category_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    output: tuple[Tensor, ...],
) -> list[Detections]:
    try:
        pictures = detector.finish(tuple(t[: len(rows)] for t in output))
    except NonFiniteError as error:
        ids = ", ".join(map(str, split.image_ids[rows[:5]].tolist()))
        more = ", ..." if len(rows) > 5 else ""
        raise NonFiniteError(f"{error} (images {ids}{more})", hint=error.hint) from None
    return [
        _in_pixels(picture, int(split.image_ids[row]), split.sizes[row], category_ids)
        for row, picture in zip(rows, pictures, strict=True)
    ]


def _in_pixels(
    detections: postprocess.ImageDetections,
    image_id: int,
    size: NDArray[np.int32],
    category_ids: NDArray[np.int64],
) -> Detections:
    """Convert to COCO's format: left, top, width, height in pixels, not clipped.

    Detections of classes without a category id (-1) are left out.
    """
    ids = category_ids[detections.labels.numpy() - 1]
    used = ids >= 0
    ltrb = detections.boxes.numpy()[used].astype(np.float64) * np.tile(size, 2)
    return Detections(
        np.full(len(ltrb), image_id, np.int64),
        np.concatenate([ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]], axis=1),
        detections.scores.numpy()[used].astype(np.float64),
        ids[used],
    )


def merge(parts: list[Detections]) -> Detections:
    """Concatenate the detections of several images or ranks."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return Detections(empty, np.zeros((0, 4)), np.zeros(0), empty)
    return Detections(*(np.concatenate(column) for column in zip(*parts, strict=True)))
