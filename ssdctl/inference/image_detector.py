"""Detect objects on images of any size: whole or in tiles, many in turn.

    detector = ImageDetector(backend, classes, tiling=Tiling(600, 0.2))
    for found in detect_ahead(detector, paths, prepare, batch_size=8, threads=4): ...

An image becomes views, which the network gets: all of it, and its tiles if there are any. Their
detections are merged into a `Result` in pixels of the image.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.config.fields import Tiling
from ssdctl.config.sections import PredictConfig
from ssdctl.data.annotations import ClassName, hint_of_classes, nfc
from ssdctl.data.coco_json import UNUSED
from ssdctl.data.image_decode import read_rgb, resized
from ssdctl.data.tiles import Window, tile_windows
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.inference.detector import DetectorBackend, detect_batches
from ssdctl.inference.sources import source_of
from ssdctl.model.postprocess import ImageDetections, merge_views
from ssdctl.model.results import Result
from ssdctl.runtime.system import map_ahead, take_batches, thread_pool

OneImage: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | NDArray[Any] | torch.Tensor
)


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

    Args:
        thresholds: The score that detections of each class must exceed; empty: any score.

    Raises:
        UsageError: The network has no class of that name.
    """

    def __init__(
        self,
        backend: DetectorBackend,
        classes: Sequence[ClassName],
        options: PredictConfig = PredictConfig(),  # noqa: B008 - immutable
        tiling: Tiling | None = None,
        thresholds: Sequence[float] = (),
    ) -> None:
        self.backend = backend
        self.classes = list(classes)
        self.options = options
        self.tiling = tiling
        self._thresholds = thresholds
        self._selected = _selected_labels([c.name for c in classes], options.classes)

    @property
    def selected_classes(self) -> dict[int, ClassName]:
        """The classes of the results, by label."""
        return {label: self.classes[label - 1] for label in self._selected}

    def prepare(self, item: Any, source: Any, image: Image.Image) -> PreparedImage:
        """Return the views of an RGB image for `detect`."""
        windows = tile_windows(*image.size, self.tiling)
        views = ((window, resized(image, window)) for window in windows)
        is_whole = self.tiling is None
        return PreparedImage(item, source, image.size, list(views) if is_whole else views)

    def detect(
        self, images: Iterable[PreparedImage | Prediction], batch_size: int
    ) -> Iterator[Prediction]:
        """Yield the objects on each image, in their order; predictions are passed on.

        Images are taken a batch at a time, or one by one with tiles.
        """
        for batch in take_batches(images, batch_size if self.tiling is None else 1):
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
        batches = take_batches(views, batch_size)
        found: list[list[tuple[Window, ImageDetections]]] = [[] for _ in images]
        pixels = ((b, torch.from_numpy(np.stack([view[1] for _, view in b]))) for b in batches)
        with self.backend.device.settings(tf32=False):
            for batch, detections in detect_batches(self.backend, pixels):
                for (n, (window, _)), result in zip(batch, detections, strict=True):
                    found[n].append((window, result))
        return [self._result(*pair) for pair in zip(images, found, strict=True)]

    def _result(
        self, image: PreparedImage, found: Sequence[tuple[Window, ImageDetections]]
    ) -> Result:
        rules = self.backend.nms_iou, self._thresholds
        boxes, scores, labels = merge_views(found, image.size, *rules)
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
    if detector.tiling is not None:
        threads = ahead = 1
    canceled = threading.Event()

    def prepared(item: Any) -> PreparedImage | Prediction | None:
        try:
            return prepare(item, canceled)
        except SsdctlError as error:
            return Prediction(item, error)

    with thread_pool(threads, "open") as pool:
        try:
            ready = map_ahead(pool, prepared, items, ahead)
            yield from detector.detect(iter(ready.__next__, None), batch_size)
        finally:  # also after Ctrl-C
            canceled.set()


def _selected_labels(names: Sequence[str], chosen: Sequence[str]) -> list[int]:
    """Return the labels of the chosen classes, or all; UsageError for an unknown name."""
    names, chosen = [*map(nfc, names)], [*map(nfc, chosen)]
    for name in chosen:
        if name not in names:
            used = [name for name in names if name != UNUSED]
            problem = f"class {name!r}: the network has no such class"
            raise UsageError(problem, hint=hint_of_classes(name, used, chosen))
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


def unshared(image: OneImage) -> OneImage:
    """Return an image that stays as it is when its owner reuses the pixels, buffer or file."""
    if isinstance(image, np.ndarray):
        return image.copy()
    if isinstance(image, torch.Tensor):
        return image.clone()
    if isinstance(image, bytearray | memoryview):
        return bytes(image)
    is_lazy = isinstance(image, Image.Image) or hasattr(image, "read")
    return open_image(image) if is_lazy else image
