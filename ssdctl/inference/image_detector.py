"""Detect objects on images of any size: whole or in tiles, many in turn.

    detector = ImageDetector(backend, classes, PredictConfig(tile=600))
    for found in detect_ahead(detector, paths, prepare, batch_size=8, threads=4): ...

An image becomes views, which the network gets: all of it, and its tiles if there are any. Their
detections are merged into a `Result` in pixels of the image. An object is cut if its box touches an
edge of a tile inside the image. As long as it is smaller than the overlap, another tile has all of
it; the view of the whole image has the larger ones.
"""

from __future__ import annotations

import difflib
import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.config.sections import PredictConfig
from ssdctl.data.annotations import ClassName
from ssdctl.data.coco_json import UNUSED
from ssdctl.data.image_decode import read_rgb, resized
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.inference.detector import DetectorBackend, detect_batches
from ssdctl.inference.sources import source_of
from ssdctl.model.postprocess import ImageDetections
from ssdctl.model.results import Result
from ssdctl.runtime.safe_text import listed
from ssdctl.runtime.threads import map_ahead

MAX_NAMED = 20  # class names listed in a message
CUT_MARGIN = 0.01  # a box this near to the window's edge touches it, as a fraction of the side
CUT_COVERED = 0.5  # drop a truncated box if a kept box covers more than this
OneImage: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | NDArray[Any] | torch.Tensor
)


class Window(NamedTuple):
    """Part of an image in its pixels."""

    left: int
    top: int
    right: int
    bottom: int


View: TypeAlias = tuple[Window, NDArray[np.uint8]]  # (300, 300, 3), as the network gets it


class PreparedImage(NamedTuple):
    """An opened image that waits for the network."""

    item: Any  # which of the stream
    source: Any  # opens the image again, to draw on it
    size: tuple[int, int]  # width and height
    views: Iterable[View]  # with tiles they are cut when they are needed


class Prediction(NamedTuple):
    """The detections on one image of a stream, or the reason why it cannot be fetched or read."""

    item: Any
    result: Result | SsdctlError
    seconds: float = 0.0  # in the network and NMS; its share of the batch


class ImageDetector:
    """A network with the options of `predict`.

    Raises:
        UsageError: The network has no class of that name.
    """

    def __init__(
        self,
        backend: DetectorBackend,
        classes: Sequence[ClassName],
        options: PredictConfig = PredictConfig(),  # noqa: B008 - immutable
    ) -> None:
        self.backend = backend
        self.classes = list(classes)
        self.options = options
        self._selected = _selected_labels([c.name for c in classes], options.classes)

    @property
    def selected_classes(self) -> dict[int, ClassName]:
        """The classes of the results, by label."""
        return {label: self.classes[label - 1] for label in self._selected}

    def prepare(self, item: Any, source: Any, image: Image.Image) -> PreparedImage:
        """Return the views of an RGB image for `detect`."""
        tile = self.options.tile
        windows = tile_windows(*image.size, tile, self.options.tile_overlap)
        views = ((window, resized(image, window)) for window in windows)
        return PreparedImage(item, source, image.size, list(views) if tile is None else views)

    def detect(
        self, images: Iterable[PreparedImage | Prediction], batch_size: int
    ) -> Iterator[Prediction]:
        """Yield the objects on each image, in their order; predictions are passed on.

        Images are taken a batch at a time, or one by one with tiles.
        """
        images, at_once = iter(images), 1 if self.options.tile is not None else batch_size
        while batch := list(itertools.islice(images, at_once)):
            good = [image for image in batch if isinstance(image, PreparedImage)]
            start = time.perf_counter()
            results = iter(self._results(good, batch_size))
            seconds = (time.perf_counter() - start) / max(len(good), 1)
            for image in batch:
                if isinstance(image, PreparedImage):
                    image = Prediction(image.item, next(results), seconds)
                yield image

    def _results(self, images: Sequence[PreparedImage], batch_size: int) -> list[Result]:
        views = ((n, view) for n, image in enumerate(images) for view in image.views)
        batches = iter(lambda: list(itertools.islice(views, batch_size)), [])
        found: list[list[tuple[Window, ImageDetections]]] = [[] for _ in images]
        pixels = ((b, torch.from_numpy(np.stack([view[1] for _, view in b]))) for b in batches)
        for batch, detections in detect_batches(self.backend, pixels):
            for (n, (window, _)), result in zip(batch, detections, strict=True):
                found[n].append((window, result))
        return [self._result(*pair) for pair in zip(images, found, strict=True)]

    def _result(
        self, image: PreparedImage, found: Sequence[tuple[Window, ImageDetections]]
    ) -> Result:
        is_clipped = len(found) > 1  # an object that exceeds its tile is on another one, too
        columns = [_in_pixels(detections, window, is_clipped) for window, detections in found]
        boxes, scores, labels = (np.concatenate(column) for column in zip(*columns, strict=True))
        if len(found) > 1:
            is_cut = [
                cut_flags(boxes, window, *image.size)
                for (window, _), (boxes, _, _) in zip(found, columns, strict=True)
            ]
            kept = merge(boxes, scores, labels, np.concatenate(is_cut), self.backend.nms_iou)
            boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
        kept = np.flatnonzero(np.isin(labels, self._selected))[: self.options.max_detections]
        return Result(
            boxes[kept],
            scores[kept],
            labels[kept],
            classes=self.classes,
            size=image.size,
            image=image.source,
            open_image=open_image,
        )


def detect_ahead(
    detector: ImageDetector,
    items: Iterable[Any],
    prepare: Callable[[Any, threading.Event], PreparedImage | None],
    *,
    batch_size: int,
    threads: int,
) -> Generator[Prediction, None, None]:
    """Yield the objects on each of many images, in their order; the iterable may be endless.

    Threads open the images of the next batches and keep only what the network gets. With tiles,
    one whole image is opened in advance. Closing the iterator ends downloads.

    Args:
        prepare: Opens and prepares an item in a thread; the event is set when the iterator is
            closed. Its expected errors are yielded in their turn. None ends the stream.
        batch_size: Images that go through the network together.
    """
    ahead = 2 * batch_size
    if detector.options.tile is not None:
        threads = ahead = 1
    canceled = threading.Event()

    def prepared(item: Any) -> PreparedImage | Prediction | None:
        try:
            return prepare(item, canceled)
        except SsdctlError as error:
            return Prediction(item, error)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="open")
    try:
        ready = map_ahead(pool, prepared, items, ahead)
        yield from detector.detect(iter(ready.__next__, None), batch_size)
    finally:  # also after Ctrl-C
        canceled.set()
        pool.shutdown(cancel_futures=True)


def _in_pixels(
    found: ImageDetections, window: Window, is_clipped: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return boxes (left, top, right, bottom), scores and labels in the whole image."""
    left, top, right, bottom = window
    scale = np.array([right - left, bottom - top] * 2)
    fractions = found.boxes.double().cpu().numpy()
    fractions = fractions.clip(0, 1) if is_clipped else fractions
    boxes = fractions * scale + [left, top, left, top]
    scores = np.array(found.scores.tolist(), np.float64)
    return boxes, scores, found.labels.cpu().numpy().astype(np.int64)


def _selected_labels(names: Sequence[str], chosen: Sequence[str]) -> list[int]:
    """Return the labels of the chosen classes, or all; UsageError for an unknown name."""
    for name in chosen:
        if name not in names:
            lower = {name.lower(): name for name in names}
            near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
            used = [name for name in names if name != UNUSED]
            hint = f"did you mean {lower[near[0]]!r}? " if near else ""
            raise UsageError(
                f"class {name!r}: the network has no such class",
                hint=f"{hint}it has: {listed(used, MAX_NAMED)}",
            )
    chosen = chosen or [name for name in names if name != UNUSED]
    return [label for label, name in enumerate(names, start=1) if name in chosen]


def open_image(image: OneImage, canceled: threading.Event | None = None) -> Image.Image:
    """Open a user's image of any kind, upright, in RGB. The event ends a download.

    Raises:
        DataError: It cannot be read as an image, or is too large.
        NetworkError: The URL cannot be fetched.
        UsageError: It is not an image, pixels of an unsupported shape or type, or another URL.
    """
    if isinstance(image, str):
        image = source_of(image).open(canceled)
    return Image.fromarray(read_rgb(image))


def tile_windows(width: int, height: int, size: int | None, overlap: float) -> list[Window]:
    """Return the whole image, and tiles that cover it if it is larger than one.

    Tiles have `size` pixels (None: no tiles); neighbors overlap by at least `overlap`, a fraction
    of the tile.
    """
    windows = [Window(0, 0, width, height)]
    if size is not None and (width > size or height > size):
        windows += [
            Window(left, top, min(left + size, width), min(top + size, height))
            for top in _starts(height, size, overlap)
            for left in _starts(width, size, overlap)
        ]
    return windows


def _starts(length: int, size: int, overlap: float) -> list[int]:
    """Return evenly spaced starts of tiles, from 0 to the last one that fits."""
    if length <= size:
        return [0]
    stride = max(int(size * (1 - overlap)), 1)
    count = -(-(length - size) // stride) + 1
    return [round(i * (length - size) / (count - 1)) for i in range(count)]


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
        while len(order):
            best, order = order[0], order[1:]
            kept.append(int(best))
            others = boxes[order]
            low = np.maximum(boxes[best, :2], others[:, :2])
            overlap = _areas(low, np.minimum(boxes[best, 2:], others[:, 2:]))
            area = _areas(others[:, :2], others[:, 2:])
            union = _areas(boxes[best, :2], boxes[best, 2:]) + area - overlap
            is_part = is_cut[order] & (overlap > CUT_COVERED * area)
            order = order[~((overlap > nms_iou * union) | is_part)]
    indices = np.array(kept, np.int64)
    return indices[np.argsort(-scores[indices], kind="stable")]


def _areas(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    areas: NDArray[np.float64] = (high - low).clip(min=0).prod(axis=-1)
    return areas
