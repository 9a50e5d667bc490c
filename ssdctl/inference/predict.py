"""Open a detector by its name, and detect on images of any kind: `ssdctl.load`, `ssdctl predict`.

predictor = ssdctl.load("ckpt.pt")
result = predictor("street.jpg")
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, overload

from PIL import Image

from ssdctl.checkpoint.file import read_model
from ssdctl.checkpoint.format import ModelFile, NetworkWeights, OnnxGraph
from ssdctl.checkpoint.locate import Named, locate_checkpoint
from ssdctl.config.sections import PredictConfig
from ssdctl.data.annotations import ClassName, numbered_classes
from ssdctl.device import Device, open_device
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import SsdctlError, UsageError, hints_in_messages
from ssdctl.inference.detector import DEFAULTS, Detector, DetectorBackend, DetectorConfig
from ssdctl.inference.image_detector import (
    ImageDetector,
    OneImage,
    PreparedImage,
    detect_ahead,
    open_image,
)
from ssdctl.inference.onnx_detector import OnnxDetector
from ssdctl.inference.sources import source_of
from ssdctl.model.results import Result
from ssdctl.model.ssd300 import SSD300, load_network
from ssdctl.runtime.system import usable_cores

log = logging.getLogger(__name__)

TILES_PER_PASS = 8


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
    def predict(self, image: list[Any] | tuple[Any, ...]) -> list[Result]: ...

    @overload
    def predict(self, image: OneImage) -> Result: ...

    @hints_in_messages()
    def predict(self, image: OneImage | list[Any] | tuple[Any, ...]) -> Result | list[Result]:
        """Return the objects on an image, the highest score first; of a list, one result each.

        Args:
            image: A path, an http(s) URL, encoded bytes, a binary file object, a Pillow image, or
                pixels, uint8 or float in 0 to 1: an array (H, W, 3) in RGB or (H, W) in gray, a
                tensor (3, H, W) or (H, W, 3). Or a list of them, which go through the network
                together.

        Raises:
            DataError: It is not a readable image.
            NetworkError: The URL cannot be fetched.
            UsageError: Pixels of another shape or type, or a URL other than http(s).
            NonFiniteError: The network's output is NaN or infinite.
        """
        images = image if isinstance(image, list | tuple) else [image]
        prepared = map(self._prepare, images)
        batch_size = TILES_PER_PASS if self._detector.options.tile else max(len(images), 1)
        found = self._detector.detect(prepared, batch_size)
        results = [result for _, result, _ in found if isinstance(result, Result)]
        return results if isinstance(image, list | tuple) else results[0]

    __call__ = predict

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
            is_array = getattr(images, "ndim", 0) in (2, 3)  # an array or tensor of pixels
            is_file = isinstance(images, (str, bytes, os.PathLike)) or hasattr(images, "read")
            if is_array or is_file or isinstance(images, Image.Image):
                raise UsageError(
                    f"predict_iter: a single {type(images).__name__}, not several images",
                    hint="give a list, or use predict",
                )
            if batch_size < 1:
                raise UsageError(f"batch_size {batch_size}: expected 1 or more")
            stream = detect_ahead(
                self._detector, images, self._prepare, batch_size=batch_size, threads=usable_cores()
            )
            for _, result, _ in stack.enter_context(contextlib.closing(stream)):
                if isinstance(result, SsdctlError):
                    raise result
                yield result

    def _prepare(self, image: OneImage, canceled: threading.Event | None = None) -> PreparedImage:
        opened = open_image(image, canceled)
        is_url = isinstance(image, str) and bool(source_of(image).url)
        # A file object and a URL are read only once; anything else is opened again to plot it.
        source = opened if is_url or hasattr(image, "read") else image
        return self._detector.prepare(image, source, opened)

    def __repr__(self) -> str:
        classes = len(self._detector.classes)
        return f"Predictor({self._source}, {classes} classes, {self._detector.backend.device.name})"


def open_detector(
    checkpoint: NetworkWeights | OnnxGraph, device: Device, config: DetectorConfig = DEFAULTS
) -> DetectorBackend:
    """Return the detector of a checkpoint or an ONNX file (`read_model`), ready to run."""
    if isinstance(checkpoint, OnnxGraph):
        return OnnxDetector(checkpoint, device, config)
    return Detector(device.place(load_network(checkpoint)).eval(), device, config)


def load_detector(
    checkpoint: Named,
    settings: PredictConfig,
    *,
    mirror: str | None = None,
) -> tuple[ImageDetector, str]:
    """Return the detector that a user names, and its kind: `ssd300-resnet34`.

    See `locate_checkpoint`; `auto` is the accelerator of this machine or rank, else the CPU.
    """
    opened = open_device(settings.device, find_ranks().local_rank)
    config = DetectorConfig(settings.precision, settings.score, settings.nms_iou)
    read = read_model(locate_checkpoint(checkpoint, mirror=mirror))
    classes, backend = class_names(read), open_detector(read, opened, config)
    return ImageDetector(backend, classes, settings), f"ssd300-{read.architecture.backbone}"


def class_names(checkpoint: ModelFile) -> list[ClassName]:
    """Return the classes of a checkpoint; numbered if a third-party file does not name them."""
    if checkpoint.classes:
        return checkpoint.classes
    count = checkpoint.architecture.num_classes - 1
    log.info("%s does not name its %d classes: they are numbered", checkpoint.path, count)
    return numbered_classes(count)
