"""Run a network over a split and collect its detections, and its loss on the same outputs.

Every image is detected once, by one rank. Images are decoded some batches ahead. On an accelerator,
or a CPU with many cores, a thread decodes the output of one batch while the network runs on the
next; on few cores the thread would only compete with the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ssdctl.data.store import Split
from ssdctl.device import Device
from ssdctl.distributed import SINGLE_PROCESS, Ranks
from ssdctl.distributed.collectives import run_and_gather
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.inference.detector import DetectorBackend, detect_batches
from ssdctl.input.batch import Batch
from ssdctl.input.loader import evaluation_batches
from ssdctl.model import fused
from ssdctl.model.backbones import constants_of_model
from ssdctl.model.loss import Losses, MultiboxLoss
from ssdctl.model.postprocess import ImageDetections, merge_views
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.safe_text import listed

View = tuple[int, ImageDetections]  # a row of the split, and what is detected there
MAX_PENDING = 2  # outputs waiting to be decoded
FEW_CORES = 4  # on 2 cores the thread lowered the rate by 3 to 5% (benchmarks/RESULTS.md)
# A single image uses other convolution kernels than a batch, and their last digits differ: the
# AP would depend on the distribution of the images over ranks.
MIN_BATCH = 2


def detect(
    detector: DetectorBackend,
    split: Split,
    rows: NDArray[np.int64],
    *,
    batch_size: int,
    threads: int,
    ranks: Ranks = SINGLE_PROCESS,
    progress: Progress | None = None,
    category_ids: NDArray[np.int64] | None = None,
    losses: ValidationLoss | None = None,
) -> Detections | None:
    """Return the detections on images of a split; None on ranks other than the first.

    An image that cannot be opened has no detections. The ranks share the rows. If the split has
    tiles, an image is detected on as a whole and in its tiles.

    Args:
        category_ids: The category id of each class of the network, -1 to leave it out; None: the
            split's, in order.
        losses: Adds up the losses of the images.
    """
    share = rows[ranks.rank :: ranks.world_size]
    share = share[split.usable[share]]
    ids = category_ids
    if ids is None:
        ids = np.array([c.id for c in split.classes], np.int64)
    max_boxes = 1 if losses is None else max(split.most_boxes, 1)

    views = _with_tiles(split, share)

    def detect_share() -> tuple[Detections, list[float]]:
        batches: Iterable[Batch] = evaluation_batches(split, views, batch_size, threads, max_boxes)
        if progress is not None:
            total = -(-len(views) // batch_size)
            batches = progress(batches, total=total, label="detecting", unit="batch")
        detected = detect_batches(
            detector,
            ((batch, batch.images) for batch in batches),
            **_batching(detector.device, batch_size),
            on_output=None if losses is None else losses.add,
            describe=lambda batch: listed(split.image_ids[batch.rows].tolist(), 5),
        )
        found = (
            (row, image)
            for batch, images in detected
            for row, image in zip(batch.rows.tolist(), images, strict=True)
        )
        parts = [
            _of_image(views, split, ids, detector.nms_iou)
            for views in _by_image(found, split.num_images)
        ]
        return Detections.joined(parts), [] if losses is None else losses.sums()

    parts = run_and_gather(detect_share, ranks)
    if not ranks.is_main:
        return None
    if losses is not None:
        losses.set_means([sums for _, sums in parts])
    return Detections.joined([detections for detections, _ in parts])


def _with_tiles(split: Split, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return images with each one's tiles after it."""
    if split.tiles is None:
        return rows
    first = np.searchsorted(split.tiles.rows, rows)
    last = np.searchsorted(split.tiles.rows, rows, side="right")
    tiles = [split.num_images + np.arange(*span) for span in zip(first, last, strict=True)]
    views = (part for row, of in zip(rows, tiles, strict=True) for part in ([row], of))
    return np.concatenate([np.empty(0, np.int64), *views])


def _batching(device: Device, batch_size: int) -> dict[str, int]:
    # Accelerators need one shape for all batches; see also MIN_BATCH.
    is_cpu = device.torch_device.type == "cpu"
    has_few_cores = is_cpu and torch.get_num_threads() <= FEW_CORES
    # The end of a lazy device's graph ends the graphs of all threads, also half-recorded ones.
    is_decoded_here = has_few_cores or device.execution == "lazy"
    return {
        "min_batch": MIN_BATCH if is_cpu else batch_size,
        "ahead": 0 if is_decoded_here else MAX_PENDING,
    }


def _by_image(found: Iterable[View], num_images: int) -> Iterator[list[View]]:
    """Yield the views of each image: of the image and, after it, of its tiles."""
    views: list[View] = []
    for view in found:
        if view[0] < num_images and views:
            yield views
            views = []
        views.append(view)
    if views:
        yield views


def _of_image(
    views: list[View],
    split: Split,
    category_ids: NDArray[np.int64],
    nms_iou: float,
) -> Detections:
    """Return the detections on an image and its tiles, merged as `ssdctl predict` does.

    As COCO has them: left, top, width, height in pixels.
    """
    row = views[0][0]
    width, height = split.sizes[row].tolist()
    windows = [(0, 0, width, height)]
    if split.tiles is not None:
        tiles = [view - split.num_images for view, _ in views[1:]]
        windows += map(tuple, split.tiles.windows[tiles].tolist())
    found = [(window, image) for window, (_, image) in zip(windows, views, strict=True)]
    ltrb, scores, labels = merge_views(found, (width, height), nms_iou)
    ids = category_ids[labels - 1]
    used = ids >= 0
    ltrb = ltrb[used]
    return Detections(
        np.full(len(ltrb), split.image_ids[row], np.int64),
        np.concatenate([ltrb[:, :2], ltrb[:, 2:] - ltrb[:, :2]], axis=1),
        scores[used],
        ids[used],
    )


class ValidationLoss:
    """Adds up the losses of images; does not wait for the device.

    It is the training loss without augmentation and in evaluation mode: if it rises while the
    training loss falls, the network overfits. `means` are those over all ranks, on the first one;
    -1 if no image has a box.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        constants = constants_of_model(model)
        self._loss = MultiboxLoss(constants=constants).to(device.torch_device)
        # It runs eagerly: only what the device cannot do is replaced.
        fused.swap_in(self._loss, [f for f in device.forms if f.startswith("no_")])
        self._device = device
        self._sums = torch.zeros(len(Losses._fields) + 1, device=device.torch_device)
        self.means: dict[str, float] = {}

    def add(self, batch: Batch, output: tuple[Tensor, ...]) -> None:
        """Add the losses of a batch; images without boxes do not count, as in training.

        The output may have further images that fill it up.
        """
        offsets, logits = output
        size, count = len(offsets), len(batch.rows)
        boxes = F.pad(batch.boxes[:count], (0, 0, 0, 0, 0, size - count))
        labels = F.pad(batch.labels[:count], (0, 0, 0, size - count))
        device = self._device.torch_device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            target_B4N, label_BN = self._loss.targets(boxes.to(device), labels.to(device))
            offsets, logits = (tensor.to(target_B4N.dtype) for tensor in output)
            losses = self._loss.compare(offsets, logits, target_B4N, label_BN)
            if self._loss.divisor == "image":
                weight = (labels > 0).any(dim=1).sum().to(device)
                sums = [size * loss for loss in losses]
            else:
                weight = (label_BN > 0).sum()
                sums = [weight * loss for loss in losses]
            self._sums += torch.stack([*sums, weight])

    def sums(self) -> list[float]:
        """Return the sums of the three losses, and the number of images or boxes to divide by."""
        return [float(value) for value in self._sums.tolist()]

    def set_means(self, sums: list[list[float]]) -> None:
        *losses, count = (sum(column) for column in zip(*sums, strict=True))
        means = [loss / count if count else -1.0 for loss in losses]
        self.means = dict(zip(("loss", "loss_box", "loss_class"), means, strict=True))
