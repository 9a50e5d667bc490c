"""Convert the network's output to detections, as every replaced system does.

Softmax; per class the 200 best above the score threshold and hard NMS; the 200 best of the image.
On the CPU the few candidates are selected first. On other devices every shape is static: nothing
synchronizes to read a count and nothing is recompiled.
Shapes: B batch, C classes with background, N default boxes, K detections of an image.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.boxes import box_cxcywh_to_ltrb, decode
from ssdctl.errors import NonFiniteError
from ssdctl.model.backbones import RESNET, ModelConstants

DEFAULT_SCORE = 0.3  # where no evaluation has found a better threshold
TILES_PER_PASS = 8
DETECTIONS_PER_IMAGE = 200
MANY_BOXES = 3000  # candidates of an image
CUT_MARGIN = 0.01  # a box this near to the window's edge touches it, as a fraction of the side
CUT_COVERED = 0.5  # drop a truncated box if a kept box covers more than this
# Boxes (left, top, right, bottom) in pixels of the image, scores and labels.
Merged = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
Window = tuple[int, int, int, int]  # part of an image: left, top, right, bottom in pixels
_lock = threading.Lock()
# Threads that evaluate a network, and its modules that were in training mode before.
_in_evaluation: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]]
_in_evaluation = weakref.WeakKeyDictionary()


class ImageDetections(NamedTuple):
    """The detections of one image, best first."""

    boxes: Tensor  # K x 4, ltrb as fractions of the image; they may exceed it
    scores: Tensor  # K
    labels: Tensor  # K, 1 and up


def detect(
    offsets_B4N: Tensor,
    logits_BCN: Tensor,
    defaults_cxcywh: Tensor,
    rules: ModelConstants = RESNET,
) -> list[ImageDetections]:
    """Decode a batch in fp32 and return the detections of each image, on the CPU.

    Args:
        rules: Candidates score more than `score_threshold`; a box with a higher IoU than `nms_iou`
            with a better box of its class is dropped.
    """
    outputs = (offsets_B4N, logits_BCN, defaults_cxcywh)
    with torch.autocast(offsets_B4N.device.type, enabled=False):
        boxes, scores = boxes_and_scores(*outputs, clips_boxes=rules.clips_boxes)
        return select_detections(boxes, scores, rules)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode during the block, then each module back into its own.

    Of threads in it at the same time, the last one puts them back.
    """
    with _lock:
        count, training = _in_evaluation.get(model, (0, []))
        training = training + [module for module in model.modules() if module.training]
        _in_evaluation[model] = count + 1, training
        if training:
            model.eval()
    try:
        yield
    finally:
        with _lock:
            count, training = _in_evaluation.pop(model)
            if count > 1:
                _in_evaluation[model] = count - 1, training
            else:
                for module in training:
                    module.training = True


def refuse_non_finite(output: tuple[Tensor, ...]) -> None:
    """Raise NonFiniteError if a network's output is NaN or infinite."""
    # A sum is NaN or infinite if a value is; torch_xla's amin and amax skip NaN.
    if not bool(torch.stack([t.float().sum() for t in output]).isfinite().all()):
        raise NonFiniteError(
            "the network's output is NaN or infinite",
            hint="the weights were damaged in training: use an earlier checkpoint",
        )


def select_detections(
    boxes_BN4: Tensor, scores_BCN: Tensor, rules: ModelConstants
) -> list[ImageDetections]:
    """Return the detections in decoded fp32 boxes and scores, on the CPU; see `detect`."""
    if boxes_BN4.device.type == "cpu":
        return [_detect_one(b, s, rules) for b, s in zip(boxes_BN4, scores_BCN, strict=True)]
    padded = [t.cpu() for t in detect_static(boxes_BN4, scores_BCN, rules)]
    return [
        ImageDetections(b[real], s[real], label[real])
        for b, s, label in zip(*padded, strict=True)
        for real in [label > 0]
    ]


def boxes_and_scores(
    offsets_B4N: Tensor,
    logits_BCN: Tensor,
    defaults_cxcywh: Tensor,
    *,
    clips_boxes: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode to (B, N, 4) ltrb boxes and (B, C - 1, N) scores without background."""
    boxes = box_cxcywh_to_ltrb(decode(offsets_B4N.float().transpose(1, 2), defaults_cxcywh))
    if clips_boxes:
        boxes = boxes.clamp(0, 1)
    return boxes, logits_BCN.float().softmax(dim=1)[:, 1:]


def detect_static(
    boxes_BN4: Tensor, scores_BCN: Tensor, rules: ModelConstants
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same detections in static shapes, best first, padded with label 0.

    Returns:
        (B, K, 4) boxes, (B, K) scores, (B, K) labels, where K = 200.
    """
    num_classes = scores_BCN.shape[1]
    count = min(rules.candidates_per_class, scores_BCN.shape[2])
    scores, index = scores_BCN.topk(count, dim=2)
    candidates = boxes_BN4.unsqueeze(1).expand(-1, num_classes, -1, -1)
    candidates = candidates.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, 4))
    keep = nms_static(candidates, scores > rules.score_threshold, rules.nms_iou)
    flat = torch.where(keep, scores, 0).flatten(1)
    best, index = flat.topk(min(DETECTIONS_PER_IMAGE, flat.shape[1]), dim=1)
    labels = torch.where(best > 0, index // scores.shape[2] + 1, 0)
    kept = candidates.flatten(1, 2).gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
    return kept, best, labels


def _detect_one(boxes_N4: Tensor, scores_CN: Tensor, rules: ModelConstants) -> ImageDetections:
    row, index = (scores_CN > rules.score_threshold).nonzero(as_tuple=True)
    scores, boxes, labels = scores_CN[row, index], boxes_N4[index], row + 1
    if len(scores) > rules.candidates_per_class:
        sizes = row.bincount(minlength=len(scores_CN))
        best = _best_per_class(scores, sizes, rules.candidates_per_class)
        scores, boxes, labels = scores[best], boxes[best], labels[best]
    keep = batched_nms(boxes, scores, labels, rules.nms_iou)[:DETECTIONS_PER_IMAGE]
    return ImageDetections(boxes[keep], scores[keep], labels[keep])


def _best_per_class(scores_K: Tensor, sizes_C: Tensor, count: int) -> Tensor:
    """Return the indices of the candidates among the `count` best of their class.

    The candidates are ordered by class; a class has `sizes_C` of them.
    """
    keep = torch.ones(len(scores_K), dtype=torch.bool)
    for i in (sizes_C > count).nonzero().flatten().tolist():
        start, size = int(sizes_C[:i].sum()), int(sizes_C[i])
        order = scores_K[start : start + size].argsort(descending=True, stable=True)
        keep[start + order[count:]] = False
    return keep.nonzero().flatten()


def batched_nms(boxes_K4: Tensor, scores_K: Tensor, labels_K: Tensor, nms_iou: float) -> Tensor:
    """Return the indices of the boxes that are kept, best first, on the CPU.

    A box with an IoU over `nms_iou` with a better box of its class is dropped. Scores are compared
    in fp64.
    """
    nms, boxes, scores = _nms_kernel(), _offset_by_class(boxes_K4, labels_K), scores_K.double()
    if len(boxes) < MANY_BOXES:
        return nms(boxes, scores, nms_iou)
    # The kernel's time grows with the square of the number of boxes: one class at a time.
    keep = torch.zeros(len(boxes), dtype=torch.bool)
    for label in labels_K.unique():
        rows = (labels_K == label).nonzero().squeeze(1)
        keep[rows[nms(boxes[rows], scores[rows], nms_iou)]] = True
    order = scores.argsort(descending=True, stable=True)
    return order[keep[order]]


def nms_static(boxes_BCK4: Tensor, keep_BCK: Tensor, nms_iou: float) -> Tensor:
    """Return (B, C, K) flags of the boxes that are kept, in static shapes.

    Args:
        boxes_BCK4: Candidates in ltrb, best first in each class.
        keep_BCK: The candidates that take part.
        nms_iou: A box with a higher IoU with a better box of its class is dropped.
    """
    # One image at a time: the overlaps of a batch would take gigabytes.
    over = torch.stack([_overlaps(boxes_CK4, nms_iou) for boxes_CK4 in boxes_BCK4])
    for i in range(boxes_BCK4.shape[2]):  # greedy: a removed box removes no other
        keep_BCK = keep_BCK & ~(over[:, :, i] & keep_BCK[:, :, i : i + 1])
    return keep_BCK


def _overlaps(boxes_CK4: Tensor, nms_iou: float) -> Tensor:
    """Return (C, K, K) flags: box i overlaps a worse box j of its class by more than `nms_iou`."""
    a, b = boxes_CK4.unsqueeze(2), boxes_CK4.unsqueeze(1)
    size = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    overlap = size.clamp(min=0).prod(dim=-1)
    area = (boxes_CK4[..., 2:] - boxes_CK4[..., :2]).prod(dim=-1)
    union = area.unsqueeze(2) + area.unsqueeze(1) - overlap
    return (overlap > nms_iou * union).triu(diagonal=1)


@functools.cache
def _nms_kernel() -> Callable[[Tensor, Tensor, float], Tensor]:
    """Return torchvision's NMS kernel, loaded without the Python package if possible.

    The package takes 9 seconds of CPU time to import, its compiled library a few milliseconds.
    """
    spec = importlib.util.find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            with contextlib.suppress(OSError):
                torch.ops.load_library(library)
    if hasattr(torch.ops.torchvision, "nms"):
        kernel: Callable[[Tensor, Tensor, float], Tensor] = torch.ops.torchvision.nms
        return kernel
    from torchvision.ops import nms

    return nms


def _offset_by_class(boxes_K4: Tensor, labels_K: Tensor) -> Tensor:
    """Shift the boxes of each class so that classes never overlap and one NMS serves all.

    In fp64 and relative to the leftmost box. torchvision's batched_nms shifts in fp32 relative to
    0: boxes left of the image overlap another class, and a huge box rounds the others away.
    """
    boxes = boxes_K4.double()
    if not len(boxes):
        return boxes
    low = boxes.min()
    extent = boxes.max() - low + 1
    return boxes - low + (labels_K * extent).unsqueeze(1)


def merge_views(
    found: Sequence[tuple[Window, ImageDetections]],
    size: tuple[int, int],
    nms_iou: float,
    thresholds: Sequence[float] = (),
) -> Merged:
    """Merge the detections in an image of `size` and its tiles: the best score first, clipped.

    An object is cut if its box touches an edge of a tile inside the image. As long as it is smaller
    than the overlap, another tile has all of it; the view of the whole image has the larger ones.
    Of one view, boxes may exceed the image.

    Args:
        found: The detections in each view, in fractions of its window.
        nms_iou: Drop a box that overlaps a better one of its class by more.
        thresholds: Before merging, drop boxes that do not exceed the score of their class; empty
            keeps all.
    """
    is_clipped = len(found) > 1  # an object that exceeds its tile is on another one, too
    columns = [_in_pixels(detections, window, is_clipped) for window, detections in found]
    if thresholds:
        least = np.array([0, *thresholds])
        kept_rows = [scores > least[labels] for _, scores, labels in columns]
        columns = [(b[k], s[k], n[k]) for (b, s, n), k in zip(columns, kept_rows, strict=True)]
    boxes, scores, labels = (np.concatenate(column) for column in zip(*columns, strict=True))
    if len(found) == 1:
        return boxes, scores, labels
    windows = [window for window, _ in found]
    flags = [cut_flags(c[0], window, *size) for c, window in zip(columns, windows, strict=True)]
    kept = merge(boxes, scores, labels, np.concatenate(flags), nms_iou)
    return boxes[kept], scores[kept], labels[kept]


def _in_pixels(found: ImageDetections, window: Window, is_clipped: bool) -> Merged:
    left, top, right, bottom = window
    scale = np.array([right - left, bottom - top] * 2)
    fractions = found.boxes.double().cpu().numpy()
    fractions = fractions.clip(0, 1) if is_clipped else fractions
    boxes = fractions * scale + [left, top, left, top]
    scores = np.array(found.scores.tolist(), np.float64)
    return boxes, scores, found.labels.cpu().numpy().astype(np.int64)


def cut_flags(
    boxes: NDArray[np.float64], window: Window, width: int, height: int
) -> NDArray[np.bool_]:
    """Return (K,) flags: the box touches an edge of its window that is not the image's."""
    low, high = np.array(window[:2]), np.array(window[2:])
    margin = CUT_MARGIN * (high - low)
    is_cut: NDArray[np.bool_] = (boxes[:, :2] <= low + margin) & (low > 0)
    is_cut |= (boxes[:, 2:] >= high - margin) & (high < [width, height])
    return is_cut[:, 0] | is_cut[:, 1]


def merge(
    boxes: NDArray[np.float64],
    scores: NDArray[np.float64],
    labels: NDArray[np.int64],
    is_cut: NDArray[np.bool_],
    nms_iou: float,
) -> NDArray[np.int64]:
    """Select the detections of all windows by NMS per class; return indices, the best score first.

    Complete boxes come before cut ones, so that part of an object never replaces all of it. A cut
    box is also dropped if a kept box covers most of it.
    """
    kept: list[int] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.lexsort((-scores[members], is_cut[members]))]
        left, top, right, bottom = np.ascontiguousarray(boxes[order].T)
        is_dropped = np.zeros(len(order), np.bool_)
        for row, best in enumerate(order.tolist()):
            if is_dropped[row]:
                continue
            kept.append(best)
            is_near = (left < right[row]) & (right > left[row]) & ~is_dropped
            is_near &= (top < bottom[row]) & (bottom > top[row])
            is_near[: row + 1] = False
            near = order[is_near]
            others = boxes[near]
            low = np.maximum(boxes[best, :2], others[:, :2])
            overlap = _areas(low, np.minimum(boxes[best, 2:], others[:, 2:]))
            area = _areas(others[:, :2], others[:, 2:])
            union = _areas(boxes[best, :2], boxes[best, 2:]) + area - overlap
            is_part = is_cut[near] & (overlap > CUT_COVERED * area)
            is_dropped[is_near] = (overlap > nms_iou * union) | is_part
    indices = np.array(kept, np.int64)
    return indices[np.argsort(-scores[indices], kind="stable")]


def _areas(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (high - low).clip(min=0).prod(axis=-1)
    return areas
