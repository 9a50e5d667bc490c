"""Detect objects on images of any size: the work of `ssdctl.load` and `ssdctl predict`.

    predictor = ssdctl.load("ckpt.pt")
    result = predictor("street.jpg")

An `ImageDetector` turns images into the network's input, by tiles if asked to, and its output into
results in pixels. `detect_ahead` is the one loop over many images: files, URLs or frames.
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
from typing import IO, Any, NamedTuple, TypeAlias, overload

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from ssdctl.boxes.default_boxes import IMAGE_SIZE
from ssdctl.checkpoint import reader
from ssdctl.checkpoint.reader import Checkpoint, read_checkpoint, read_model
from ssdctl.data.classes import UNUSED, ClassName
from ssdctl.data.image_decode import read_rgb
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import SsdctlError, UsageError, hints_in_messages
from ssdctl.inference.detector import DEFAULTS, Detector, DetectorBackend, DetectorConfig
from ssdctl.inference.image_sources import UrlSource, source_of
from ssdctl.inference.model_source import locate_checkpoint
from ssdctl.inference.onnx_detector import OnnxDetector
from ssdctl.inference.results import Result
from ssdctl.inference.tiles import MIN_TILE, Window, cut_flags, merge, tile_windows
from ssdctl.model import postprocess
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.map_ahead import map_ahead

log = logging.getLogger(__name__)

MAX_NAMED = 20  # class names listed in a message
MAX_OVERLAP = 0.9
TILES_PER_PASS = 8
OneImage: TypeAlias = (
    str | os.PathLike[str] | bytes | IO[bytes] | Image.Image | NDArray[Any] | torch.Tensor
)
REMOVED = {
    "predict_many": "pass a list to Predictor.predict",
    "class_names": "see Result.class_names, or Predictor.model.class_names",
    "returned_classes": "see Result.class_names",
    "options": "it has what ssdctl.load was given",
}


class Options(NamedTuple):
    """Which detections are returned, and how they are looked for."""

    classes: Sequence[str] = ()  # only these; empty: all
    max_detections: int | None = None  # per image, best first; None: all that the network gives
    tile: int | None = None  # side of the tiles in pixels; None: only the whole image
    tile_overlap: float = 0.2  # of neighbors, as a fraction of the tile


class ImageView(NamedTuple):
    """An image as the network gets it."""

    size: tuple[int, int]  # width and height of the image
    pixels: NDArray[np.uint8]  # (300, 300, 3)


class OpenedImage(NamedTuple):
    """An image that was opened in a thread."""

    item: Any  # which of the stream
    source: Any  # opens the image again, to draw on it
    image: Image.Image  # in RGB


class Prepared(NamedTuple):
    """The part of an opened image that is kept until it goes through the network."""

    item: Any
    source: Any
    content: ImageView | Image.Image


class Prediction(NamedTuple):
    """The detections on one image of a stream."""

    item: Any
    result: Result
    seconds: float  # in the network and NMS; its share of the batch


class UnreadableImage(NamedTuple):
    """An image of a stream that could not be fetched or read."""

    item: Any
    error: SsdctlError


class ImageDetector:
    """A network with the choice of what it returns.

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
        self.backend = detector
        self.classes = list(classes)
        self._selected = _selected_labels([c.name for c in classes], options.classes)
        if options.tile is not None and options.tile < MIN_TILE:
            raise UsageError(f"tile {options.tile}: the smallest tile has {MIN_TILE} pixels")
        if not 0 <= options.tile_overlap <= MAX_OVERLAP:
            raise UsageError(
                f"tile overlap {options.tile_overlap}: not a fraction from 0 to {MAX_OVERLAP}"
            )
        self.options = options

    @property
    def selected_classes(self) -> dict[int, ClassName]:
        """The classes that results may have, by label."""
        return {label: self.classes[label - 1] for label in self._selected}

    def prepare(self, image: Image.Image) -> ImageView | Image.Image:
        """Return what `detect` needs of an image: a view, or with tiles all of it."""
        return image if self.options.tile else ImageView(image.size, resized(image))

    def detect(self, images: Sequence[Prepared], tiles_per_pass: int) -> list[Result]:
        """Return the objects on each image, from one pass; with tiles, from passes of its own."""
        found = []
        if views := [image.content for image in images if isinstance(image.content, ImageView)]:
            pixels = torch.from_numpy(np.stack([view.pixels for view in views]))
            for view, detections in zip(views, self.backend(pixels), strict=True):
                found.append(_in_window(detections, Window(0, 0, *view.size)))
        else:
            for image in images:
                assert isinstance(image.content, Image.Image)
                found.append(self._detect_tiles(image.content, tiles_per_pass))
        return [
            self._result(arrays, image.content.size, image.source)
            for arrays, image in zip(found, images, strict=True)
        ]

    def _detect_tiles(self, image: Image.Image, batch_size: int) -> Found:
        """Detect on tiles and on the whole image; `batch_size` views are in memory at a time."""
        assert self.options.tile is not None
        width, height = image.size
        windows = iter(tile_windows(width, height, self.options.tile, self.options.tile_overlap))
        parts: list[Found] = []
        cuts: list[NDArray[np.bool_]] = []
        while batch := list(itertools.islice(windows, batch_size)):
            pixels = torch.from_numpy(np.stack([resized(image, window) for window in batch]))
            for window, result in zip(batch, self.backend(pixels), strict=True):
                parts.append(_in_window(result, window))
                cuts.append(cut_flags(parts[-1].boxes, window, width, height))
        boxes, scores, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        kept = merge(boxes, scores, labels, np.concatenate(cuts), self.backend.nms_iou)
        return Found(boxes[kept], scores[kept], labels[kept])

    def _result(self, found: Found, size: tuple[int, int], source: Any) -> Result:
        kept = np.flatnonzero(np.isin(found.labels, self._selected))[: self.options.max_detections]
        return Result(
            found.boxes[kept].round(2),
            found.scores[kept].round(5),
            found.labels[kept],
            classes=self.classes,
            size=size,
            image=source,
            open_image=open_image,
        )


def detect_ahead(
    detector: ImageDetector,
    items: Iterable[Any],
    opened: Callable[[Any, threading.Event], OpenedImage | None],
    *,
    batch_size: int,
    threads: int,
) -> Generator[Prediction | UnreadableImage, None, None]:
    """Yield the objects on each of many images, in their order.

    Threads open the images of the next batches and keep only what the network gets. With tiles,
    one whole image is opened in advance. Closing the iterator ends downloads.

    Args:
        detector: Finds the objects.
        items: Images of any kind; the iterable may be endless.
        opened: Opens an item in a thread; the event is set when the iterator is closed. Its
            expected errors are yielded in their turn. None ends the stream.
        batch_size: Images that go through the network together.
        threads: How many open images.
    """
    at_once, ahead = batch_size, 2 * batch_size
    if detector.options.tile is not None:
        threads = at_once = ahead = 1
    cancelled = threading.Event()

    def prepared(item: Any) -> Prepared | UnreadableImage | None:
        try:
            image = opened(item, cancelled)
        except SsdctlError as error:
            return UnreadableImage(item, error)
        return image and Prepared(image.item, image.source, detector.prepare(image.image))

    pool = ThreadPoolExecutor(threads, thread_name_prefix="open")
    try:
        ready = map_ahead(pool, prepared, items, ahead)
        while batch := list(itertools.islice(ready, at_once)):
            good = [entry for entry in batch if isinstance(entry, Prepared)]
            start = time.perf_counter()
            results = iter(detector.detect(good, batch_size))
            seconds = (time.perf_counter() - start) / max(len(good), 1)
            for entry in batch:
                if entry is None:
                    return
                if isinstance(entry, UnreadableImage):
                    yield entry
                else:
                    yield Prediction(entry.item, next(results), seconds)
    finally:  # also after Ctrl-C
        cancelled.set()
        pool.shutdown(cancel_futures=True)


class Predictor:
    """Detect objects on images with a network. Created by `ssdctl.load`; may be called.

    Args:
        detector: Finds the objects.
        source: The checkpoint's name, for messages.
    """

    def __init__(self, detector: ImageDetector, source: str) -> None:
        self._detector = detector
        self._source = source

    @property
    @hints_in_messages()
    def model(self) -> SSD300:
        """The network, on its device, in evaluation mode.

        Raises:
            UsageError: It is an ONNX file, which has no PyTorch network.
        """
        backend = self._detector.backend
        if not isinstance(backend, Detector) or not isinstance(backend.model, SSD300):
            raise UsageError(
                f"{self._source}: an ONNX file has no PyTorch network",
                hint="load the checkpoint that it was exported from",
            )
        return backend.model

    @overload
    def __call__(self, image: list[Any] | tuple[Any, ...]) -> list[Result]: ...

    @overload
    def __call__(self, image: OneImage) -> Result: ...

    def __call__(self, image: OneImage | list[Any] | tuple[Any, ...]) -> Result | list[Result]:
        """Do what `predict` does."""
        return self.predict(image)

    @overload
    def predict(self, image: list[Any] | tuple[Any, ...]) -> list[Result]: ...

    @overload
    def predict(self, image: OneImage) -> Result: ...

    @hints_in_messages()
    def predict(self, image: OneImage | list[Any] | tuple[Any, ...]) -> Result | list[Result]:
        """Return the objects on an image, the highest score first; of a list, one result each.

        Args:
            image: A path, an http(s) URL, encoded bytes, a binary file object, a Pillow image, or
                RGB pixels: a uint8 array (H, W, 3) or a uint8 tensor (3, H, W) or (H, W, 3). Or a
                list of them, which go through the network together.

        Raises:
            DataError: It is not a readable image.
            NetworkError: The URL cannot be fetched.
            UsageError: Pixels of another shape or type, or a URL other than http(s).
            NonFiniteError: The network's output is NaN or infinite.
        """
        images = image if isinstance(image, list | tuple) else [image]
        opened = [self._open(entry) for entry in images]
        detector = self._detector
        prepared = [Prepared(o.item, o.source, detector.prepare(o.image)) for o in opened]
        results = detector.detect(prepared, TILES_PER_PASS)
        return results if isinstance(image, list | tuple) else results[0]

    def predict_iter(self, images: Iterable[OneImage], *, batch_size: int = 8) -> Iterator[Result]:
        """Yield the objects on each of many images, in their order.

        Threads open the images of the next batches; results of earlier ones are not kept.

        Args:
            images: Images as `predict` takes them; the iterable may be endless.
            batch_size: Images that go through the network together.

        Raises:
            DataError, NetworkError: An image cannot be read; those before were yielded.
            UsageError: `images` is a single image, or the batch size is below 1.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(hints_in_messages())
            if isinstance(images, (str, bytes, os.PathLike, Image.Image)):
                raise UsageError(
                    f"predict_iter: a single {type(images).__name__}, not several images",
                    hint="give a list, or use predict",
                )
            if batch_size < 1:
                raise UsageError(f"batch_size {batch_size}: expected 1 or more")
            stream = detect_ahead(
                self._detector, images, self._open, batch_size=batch_size, threads=usable_cores()
            )
            for found in stack.enter_context(contextlib.closing(stream)):
                if isinstance(found, UnreadableImage):
                    raise found.error
                yield found.result

    def _open(self, image: OneImage, cancelled: threading.Event | None = None) -> OpenedImage:
        opened = open_image(image, cancelled)
        is_url = isinstance(image, str) and isinstance(source_of(image), UrlSource)
        # A file object and a URL are read only once; anything else is opened again to plot it.
        source = opened if is_url or hasattr(image, "read") else image
        return OpenedImage(image, source, opened)

    def __getattr__(self, name: str) -> Any:
        if name in REMOVED:
            raise AttributeError(f"Predictor.{name} is gone: {REMOVED[name]}")
        raise AttributeError(f"'Predictor' object has no attribute {name!r}")

    def __repr__(self) -> str:
        classes = len(self._detector.classes)
        return f"Predictor({self._source}, {classes} classes, {self._detector.backend.device_name})"


class Found(NamedTuple):
    """The detections on an image as arrays, the highest score first."""

    boxes: NDArray[np.float64]  # K x 4: left, top, right, bottom in pixels, clipped
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]


def _in_window(result: postprocess.ImageDetections, window: Window) -> Found:
    """Convert the network's detections on a window to pixels of the image."""
    left, top, right, bottom = window
    scale = np.array([right - left, bottom - top] * 2)
    boxes = result.boxes.double().cpu().numpy().clip(0, 1) * scale + [left, top, left, top]
    scores = np.array(result.scores.tolist(), np.float64)
    return Found(boxes, scores, result.labels.cpu().numpy().astype(np.int64))


def _selected_labels(names: Sequence[str], chosen: Sequence[str]) -> list[int]:
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
    return [label for label, name in enumerate(names, start=1) if name in chosen]


def open_detector(
    checkpoint: Checkpoint, device: Device, config: DetectorConfig = DEFAULTS
) -> DetectorBackend:
    """Return the detector of a checkpoint or an ONNX file (`read_model`), ready to run.

    Raises:
        UsageError: The device, precision or a threshold does not suit the file.
        IntegrityError: The weights do not fit the network, or the graph is damaged.
    """
    if checkpoint.graph is not None:
        return OnnxDetector(checkpoint, device, config)
    return Detector(device.place(reader.load_network(checkpoint)).eval(), device, config)


def load_detector(
    checkpoint: str | os.PathLike[str],
    *,
    device: str = "auto",
    config: DetectorConfig,
    options: Options = Options(),  # noqa: B008 - immutable
    mirror: str | None = None,
) -> tuple[ImageDetector, str]:
    """Return the detector that a user names, and what it is: `ssd300-resnet34` or a file's name.

    Args:
        checkpoint: See `locate_checkpoint`.
        device: `auto` is the accelerator of this machine or rank, else the CPU.
        config: The precision and the thresholds.
        options: What it returns.
        mirror: Base URL to fetch a published detector from instead.
    """
    opened = open_device(device, find_ranks().local_rank)
    read = read_model(locate_checkpoint(checkpoint, mirror=mirror))
    classes, backend = class_names(read), open_detector(read, opened, config)
    if isinstance(backend, Detector) and isinstance(backend.model, SSD300):
        backend.model.class_names = [c.name for c in classes]
    detector = ImageDetector(backend, classes, options)
    return detector, f"ssd300-{read.architecture.backbone}"


def load_network(checkpoint: str | os.PathLike[str]) -> SSD300:
    """Do the work of `SSD300.from_checkpoint`."""
    read = read_checkpoint(locate_checkpoint(checkpoint))
    model = reader.load_network(read).eval()
    model.class_names = [c.name for c in class_names(read)]
    return model


SSD300.open_checkpoint = staticmethod(load_network)


def class_names(checkpoint: Checkpoint) -> list[ClassName]:
    """Return the classes of a checkpoint; numbered if a third-party file does not name them."""
    if checkpoint.classes:
        return checkpoint.classes
    count = checkpoint.architecture.num_classes - 1
    log.info("%s does not name its %d classes: they are numbered", checkpoint.path, count)
    return [ClassName(None, f"class {label}") for label in range(1, count + 1)]


def open_image(image: OneImage, cancelled: threading.Event | None = None) -> Image.Image:
    """Open a user's image of any kind, upright, in RGB. The event ends a download.

    Raises:
        DataError: It cannot be read as an image, or is too large.
        NetworkError: The URL cannot be fetched.
        UsageError: It is not an image, pixels of an unsupported shape or type, or another URL.
    """
    if isinstance(image, str):
        image = source_of(image).open(cancelled)
    return Image.fromarray(read_rgb(image))


def resized(image: Image.Image, window: Window | None = None) -> NDArray[np.uint8]:
    """Resize an image, or a part of it, as evaluation does: antialiased bilinear, in uint8."""
    part = image.crop(window) if window is not None else image
    return np.asarray(part.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR))
