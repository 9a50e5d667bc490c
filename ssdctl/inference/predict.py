"""Detect objects on pictures: the result of `ssdctl.load`, and the work of `ssdctl predict`.

predictor = ssdctl.load("ckpt.pt")
for found in predictor.predict("street.jpg"):
    found.name, found.score, found.box
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.checkpoint.reader import Checkpoint, read_model
from ssdctl.data.classes import UNUSED, ClassName
from ssdctl.data.image_decode import Picture, read_rgb
from ssdctl.device import open_device
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.inference.detector import DetectorBackend, DetectorConfig
from ssdctl.inference.model_source import locate_checkpoint
from ssdctl.inference.open_detector import open_detector
from ssdctl.inference.results import Detection, LabelledClass, Result
from ssdctl.inference.sources import UrlSource, source_of
from ssdctl.inference.tiles import MIN_TILE, Window, cut_flags, merge, tile_windows
from ssdctl.model import postprocess
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.map_ahead import map_ahead

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_NAMED = 20  # class names listed in a message
MAX_OVERLAP = 0.9
TILES_PER_PASS = 8
OnePicture: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | NDArray[Any] | torch.Tensor
)


class Options(NamedTuple):
    """Which detections a predictor returns, and how it looks for them."""

    classes: Sequence[str] = ()  # only these; empty: all
    max_detections: int | None = None  # of a picture, the best; None: as many as the network gives
    tile: int | None = None  # side of the tiles in pixels; None: only the whole picture
    tile_overlap: float = 0.2  # of neighbours, as a fraction of the tile


class View(NamedTuple):
    """A picture as the network gets it."""

    size: tuple[int, int]  # width and height of the picture
    pixels: NDArray[np.uint8]  # (300, 300, 3)


class _OpenedPicture(NamedTuple):
    """A picture that was opened: its source to open it again, its size, what the network needs."""

    source: Picture
    size: tuple[int, int]
    prepared: Any  # see Predictor.prepared


class Predictor:
    """Detect objects on pictures with a network. Created by `ssdctl.load`.

    Args:
        detector: Finds the objects; see `open_detector`.
        classes: The dataset's, in the order of the detector's labels.
        options: Classes, number of detections, tiles.

    Raises:
        UsageError: The network has no class of that name, or the tiles are too small.
    """

    def __init__(
        self,
        detector: DetectorBackend,
        classes: Sequence[ClassName],
        options: Options = Options(),  # noqa: B008 - immutable
    ) -> None:
        self._detector = detector
        self._classes = list(classes)
        self._selected = _selected_classes(self.class_names, options.classes)
        if options.tile is not None and options.tile < MIN_TILE:
            raise UsageError(f"tile {options.tile}: the smallest tile has {MIN_TILE} pixels")
        if not 0 <= options.tile_overlap <= MAX_OVERLAP:
            raise UsageError(
                f"tile overlap {options.tile_overlap}: not a fraction from 0 to {MAX_OVERLAP}"
            )
        self.options = options

    @property
    def class_names(self) -> list[str]:
        """The names of the classes."""
        return [c.name for c in self._classes]

    @property
    def returned_classes(self) -> list[LabelledClass]:
        """The classes that results may have."""
        return [
            LabelledClass(label, c.id if c.id is not None else label, c.name)
            for label, c in enumerate(self._classes, start=1)
            if label in self._selected
        ]

    @overload
    def predict(self, picture: list[Picture] | tuple[Picture, ...]) -> list[Result]: ...

    @overload
    def predict(self, picture: OnePicture) -> Result: ...

    def predict(self, picture: Picture) -> Result | list[Result]:
        """Return the objects on a picture, the highest score first; of a list, one result each.

        Args:
            picture: A path, an http(s) URL, encoded bytes, a binary file object, a Pillow image, or
                RGB pixels as an array or tensor; see `ssdctl.data.image_decode.read_rgb`. Or a list
                of them, which go through the network together.

        Raises:
            DataError: It is not a readable picture.
            NetworkError: The URL cannot be fetched.
            NonFiniteError: The network's output is NaN or infinite.
        """
        if isinstance(picture, list | tuple):
            return self.predict_many(picture)
        return self.predict_many([picture])[0]

    def predict_many(self, pictures: Sequence[Picture]) -> list[Result]:
        """Return the objects on several pictures, from one pass through the network.

        With tiles, each picture takes passes of its own.
        """
        return self._results([self._open(picture) for picture in pictures])

    def predict_iter(self, pictures: Iterable[Picture], *, batch_size: int = 8) -> Iterator[Result]:
        """Yield the objects on each of many pictures, in their order.

        Threads open the pictures of the next batches; results of earlier ones are not kept.

        Args:
            pictures: Pictures as `predict` takes them; the iterable may be endless.
            batch_size: Pictures that go through the network together.

        Raises:
            DataError, NetworkError: A picture cannot be read; those before were yielded.
            UsageError: `pictures` is a single picture, or the batch size is below 1.
        """
        if isinstance(pictures, (str, bytes, os.PathLike, Image.Image)):
            raise UsageError(
                f"predict_iter: a single {type(pictures).__name__}, not several pictures",
                hint="give a list, or use predict",
            )
        if batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: expected 1 or more")

        def opened(picture: Picture, cancelled: threading.Event) -> _OpenedPicture | SsdctlError:
            try:
                return self._open(picture, cancelled)
            except SsdctlError as error:  # raised when its turn comes
                return error

        with contextlib.closing(
            self.detect_ahead(pictures, opened, batch_size=batch_size, threads=usable_cores())
        ) as found:
            for item, detections, _ in found:
                if isinstance(item, SsdctlError):
                    raise item
                yield Result(detections, item.size, item.source, open_picture)

    def detect_ahead(
        self,
        items: Iterable[T],
        opened: Callable[[T, threading.Event], Any],
        *,
        batch_size: int,
        threads: int,
    ) -> Generator[tuple[Any, list[Detection], float], None, None]:
        """Yield what `opened` returns for each item, the objects on it, and its share of the time.

        The order is that of the items. The time is that of the network and NMS, in seconds.

        Threads open the pictures of the next batches and keep only what the network gets. With
        tiles, one whole picture is opened in advance. Closing the iterator ends downloads.

        Args:
            items: Pictures of any kind; the iterable may be endless.
            opened: Opens an item in a thread; the event is set when the iterator is closed. Returns
                an object whose `prepared` goes through the network, or an object without one, which
                has no detections.
            batch_size: Pictures that go through the network together.
            threads: That open pictures.
        """
        at_once, ahead = batch_size, 2 * batch_size
        if self.options.tile is not None:
            threads = at_once = ahead = 1
        cancelled = threading.Event()
        pool = ThreadPoolExecutor(threads, thread_name_prefix="open")
        try:
            ready = map_ahead(pool, lambda item: opened(item, cancelled), items, ahead)
            while batch := list(itertools.islice(ready, at_once)):
                good = [item.prepared for item in batch if hasattr(item, "prepared")]
                start = time.perf_counter()
                detections = iter(self.predict_prepared(good, batch_size))
                seconds = (time.perf_counter() - start) / max(len(good), 1)
                for item in batch:
                    yield item, next(detections) if hasattr(item, "prepared") else [], seconds
        finally:  # also after Ctrl-C
            cancelled.set()
            pool.shutdown(cancel_futures=True)

    def _open(self, picture: Picture, cancelled: threading.Event | None = None) -> _OpenedPicture:
        image = open_picture(picture, cancelled)
        is_url = isinstance(picture, str) and isinstance(source_of(picture), UrlSource)
        # A file object and a URL are read only once; anything else is opened again to plot it.
        source = image if is_url or hasattr(picture, "read") else picture
        return _OpenedPicture(source, image.size, self.prepared(image))

    def _results(self, opened: Sequence[_OpenedPicture]) -> list[Result]:
        found = self.predict_prepared([item.prepared for item in opened], TILES_PER_PASS)
        return [
            Result(detections, item.size, item.source, open_picture)
            for item, detections in zip(opened, found, strict=True)
        ]

    def prepared(self, image: Image.Image) -> Any:
        """Return what `predict_prepared` needs of a picture: a view, or with tiles all of it."""
        return image if self.options.tile else view_of(image)

    def predict_prepared(
        self, pictures: Sequence[Any], tiles_per_pass: int
    ) -> list[list[Detection]]:
        """Return the objects on each picture, from one pass; with tiles, from passes of its own."""
        if self.options.tile is None:
            return self.predict_views(pictures)
        return [self.predict_tiled(picture, tiles_per_pass) for picture in pictures]

    def predict_views(self, views: Sequence[View]) -> list[list[Detection]]:
        """Return the objects on pictures that are already resized, from one pass."""
        if not views:
            return []
        pixels = torch.from_numpy(np.stack([view.pixels for view in views]))
        return [
            self._detections(_in_window(result, Window(0, 0, *view.size)))
            for view, result in zip(views, self._detector(pixels), strict=True)
        ]

    def predict_tiled(self, image: Image.Image, batch_size: int) -> list[Detection]:
        """Return the objects on a picture, from views of its tiles and of all of it.

        Args:
            image: In RGB. Only `batch_size` views of it are in memory at a time.
            batch_size: Views for a pass through the network.
        """
        assert self.options.tile is not None
        width, height = image.size
        windows = iter(tile_windows(width, height, self.options.tile, self.options.tile_overlap))
        parts: list[Found] = []
        cuts: list[NDArray[np.bool_]] = []
        while batch := list(itertools.islice(windows, batch_size)):
            pixels = torch.from_numpy(np.stack([resized(image, window) for window in batch]))
            for window, result in zip(batch, self._detector(pixels), strict=True):
                parts.append(_in_window(result, window))
                cuts.append(cut_flags(parts[-1].boxes, window, width, height))
        boxes = np.concatenate([part.boxes for part in parts])
        scores = np.concatenate([part.scores for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        kept = merge(boxes, scores, labels, np.concatenate(cuts), self._detector.nms_iou)
        return self._detections(Found(boxes[kept], scores[kept], labels[kept]))

    def _detections(self, found: Found) -> list[Detection]:
        detections = []
        for box, score, label in zip(*(array.tolist() for array in found), strict=True):
            if label not in self._selected:
                continue
            entry = self._classes[label - 1]
            left, top, right, bottom = (round(v, 2) for v in box)
            detections.append(
                Detection(entry.name, label, entry.id, round(score, 5), (left, top, right, bottom))
            )
        return detections[: self.options.max_detections]


class Found(NamedTuple):
    """The detections on a picture as arrays, the highest score first."""

    boxes: NDArray[np.float64]  # K x 4: left, top, right, bottom in pixels, clipped
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]


def _in_window(result: postprocess.ImageDetections, window: Window) -> Found:
    """Convert the network's detections on a window to pixels of the picture."""
    left, top, right, bottom = window
    scale = np.array([right - left, bottom - top] * 2)
    boxes = result.boxes.double().cpu().numpy().clip(0, 1) * scale + [left, top, left, top]
    scores = np.array(result.scores.tolist(), np.float64)
    return Found(boxes, scores, result.labels.cpu().numpy().astype(np.int64))


def _selected_classes(names: Sequence[str], chosen: Sequence[str]) -> set[int]:
    """Return the labels of the chosen classes, all if none are chosen.

    Raises:
        UsageError: There is no class of that name; the hint has the nearest.
    """
    for name in chosen:
        if name not in names:
            lower = {name.lower(): name for name in names}
            near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
            used = [name for name in names if name != UNUSED]
            listed = ", ".join(used[:MAX_NAMED]) + (", ..." if len(used) > MAX_NAMED else "")
            hint = f"did you mean {lower[near[0]]!r}? " if near else ""
            raise UsageError(
                f"class {name!r}: the network has no such class", hint=f"{hint}it has: {listed}"
            )
    chosen = chosen or [name for name in names if name != UNUSED]
    return {label for label, name in enumerate(names, start=1) if name in chosen}


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str = "auto",
    score: float = 0.3,
    nms_iou: float | None = None,
    precision: str = "fp32",
    options: Options = Options(),  # noqa: B008 - immutable
    mirror: str | None = None,
) -> Predictor:
    """See `ssdctl.load`; a detector is fetched from `mirror` if it is given."""
    opened = open_device(device)
    read = read_model(locate_checkpoint(checkpoint, mirror=mirror))
    detector = open_detector(read, opened, DetectorConfig(precision, score, nms_iou))
    return Predictor(detector, class_names(read), options)


def class_names(checkpoint: Checkpoint) -> list[ClassName]:
    """Return the classes of a checkpoint; numbered if a third-party file does not name them."""
    if checkpoint.classes:
        return checkpoint.classes
    count = checkpoint.architecture.num_classes - 1
    log.info("%s does not name its %d classes: they are numbered", checkpoint.path, count)
    return [ClassName(None, f"class {label}") for label in range(1, count + 1)]


def open_picture(picture: Picture, cancelled: threading.Event | None = None) -> Image.Image:
    """Open a user's picture of any kind, upright, in RGB. The event ends a download.

    Raises:
        DataError: It cannot be read as a picture, or is too large.
        NetworkError: The URL cannot be fetched.
        UsageError: It is not a picture, pixels of an unsupported shape or type, or another URL.
    """
    if isinstance(picture, str):
        picture = source_of(picture).open(cancelled)
    return Image.fromarray(read_rgb(picture))


def view_of(image: Image.Image) -> View:
    """Resize a picture to the network's input."""
    return View(image.size, resized(image))


def resized(image: Image.Image, window: Window | None = None) -> NDArray[np.uint8]:
    """Resize a picture, or a part of it, as evaluation does: antialiased bilinear, in uint8."""
    part = image.crop(window) if window is not None else image
    return np.asarray(part.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
