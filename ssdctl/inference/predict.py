"""Open a detector by its name, and detect on images of any kind: `ssdctl.load`, `ssdctl predict`.

predictor = ssdctl.load("ckpt.pt")
result = predictor("street.jpg")
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any, overload

from PIL import Image

from ssdctl.checkpoint.file import read_model
from ssdctl.checkpoint.format import ModelFile, NetworkWeights, OnnxGraph
from ssdctl.checkpoint.locate import Named, locate_checkpoint
from ssdctl.config.call import public_call, public_iterator, whole_number
from ssdctl.config.settings import Config
from ssdctl.data.annotations import ClassName, numbered_classes
from ssdctl.data.tiles import tiling_of
from ssdctl.device import Device, open_device
from ssdctl.distributed import find_ranks
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.inference.detector import DEFAULTS, Detector, DetectorBackend, DetectorConfig
from ssdctl.inference.image_detector import (
    ImageDetector,
    OneImage,
    PreparedImage,
    detect_ahead,
    open_image,
    unshared,
)
from ssdctl.inference.onnx_detector import OnnxDetector
from ssdctl.inference.sources import is_video, refuse_video_url, source_of
from ssdctl.inference.video import open_video
from ssdctl.model.postprocess import DEFAULT_SCORE, TILES_PER_PASS
from ssdctl.model.results import Result
from ssdctl.model.ssd300 import SSD300, load_network
from ssdctl.runtime.system import usable_cores

log = logging.getLogger(__name__)


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
    @public_call()
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
    def predict(self, image: OneImage) -> Result: ...

    @overload
    def predict(self, image: list[Any] | tuple[Any, ...]) -> list[Result]: ...

    @public_call()
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
        batch_size = TILES_PER_PASS if self._detector.tiling else max(len(images), 1)
        found = self._detector.detect(prepared, batch_size)
        results = [result for _, result, _ in found if isinstance(result, Result)]
        return results if isinstance(image, list | tuple) else results[0]

    __call__ = predict

    @public_iterator
    def predict_iter(
        self, images: Iterable[OneImage] | str | os.PathLike[str], *, batch_size: int = 8
    ) -> Generator[Result, None, None]:
        """Yield the objects on each of many images, in their order.

        Threads open the images of the next batches; results of earlier ones are not kept.

        Args:
            images: Images as `predict` takes them; the iterable may be endless, and may yield the
                same array, buffer or file object with new content, but not the same path.
                Or the path of a video, or a camera, such as `/dev/video0`: its frames.
            batch_size: Images that go through the network together.

        Raises:
            DataError, NetworkError: An image cannot be read; those before were yielded.
            UsageError: `images` is a single image, the batch size is below 1, or PyAV, which
                reads videos, is not installed.
        """
        with contextlib.ExitStack() as stack:
            items: Any = images
            if isinstance(images, str | os.PathLike) and is_video(os.fspath(images)):
                refuse_video_url(os.fspath(images))
                video = stack.enter_context(open_video(os.fspath(images)))
                items = (frame.pixels for frame in video.frames())
            is_array = getattr(items, "ndim", 0) in (2, 3)  # an array or tensor of pixels
            is_file = isinstance(items, str | bytes | os.PathLike) or hasattr(items, "read")
            is_iterable = hasattr(items, "__iter__") or hasattr(items, "__getitem__")
            if is_array or is_file or isinstance(items, Image.Image) or not is_iterable:
                raise UsageError(
                    f"predict_iter: a single {type(items).__name__}, not several images",
                    hint="give a list, or use predict",
                )
            batch_size = whole_number("batch_size", batch_size)
            if items is images and not isinstance(images, list | tuple):
                items = _given(images)
            stream = detect_ahead(
                self._detector, items, self._prepare, batch_size=batch_size, threads=usable_cores()
            )
            for _, result, _ in stack.enter_context(contextlib.closing(stream)):
                if isinstance(result, SsdctlError):
                    raise result
                yield result

    def _prepare(self, image: OneImage, canceled: threading.Event | None = None) -> PreparedImage:
        if isinstance(image, str | os.PathLike) and is_video(os.fspath(image)):
            refuse_video_url(os.fspath(image))
            raise UsageError(
                f"{os.fspath(image)}: a video, not an image",
                hint="predict_iter(path) yields a result for each frame",
            )
        opened = open_image(image, canceled)
        is_url = isinstance(image, str) and bool(source_of(image).url)
        # A file object and a URL are read only once; anything else is opened again to plot it.
        source = opened if is_url or hasattr(image, "read") else image
        return self._detector.prepare(image, source, opened)

    def __repr__(self) -> str:
        classes = len(self._detector.classes)
        return f"Predictor({self._source}, {classes} classes, {self._detector.backend.device.name})"


def _given(images: Iterable[OneImage]) -> Iterator[OneImage]:
    """Yield the user's images; a refusal of the file system in between stays as it is."""
    try:
        for image in images:
            yield unshared(image)
    except OSError as error:
        vars(error)["is_users"] = True
        raise


def open_detector(
    checkpoint: NetworkWeights | OnnxGraph, device: Device, config: DetectorConfig = DEFAULTS
) -> DetectorBackend:
    """Return the detector of a checkpoint or an ONNX file (`read_model`), ready to run."""
    if isinstance(checkpoint, OnnxGraph):
        return OnnxDetector(checkpoint, device, config)
    return Detector(device.place(load_network(checkpoint)).eval(), device, config)


def load_detector(checkpoint: Named, config: Config) -> tuple[ImageDetector, str]:
    """Return the detector that a user names, and its kind: `ssd300-resnet34`.

    See `locate_checkpoint`; `auto` is the accelerator of this machine or rank, else the CPU.
    """
    opened = open_device(config.predict.device, find_ranks().local_rank)
    read = read_model(locate_checkpoint(checkpoint, mirror=config.download.mirror))
    settings = (config := fit_to_graph(read, config)).predict
    thresholds = score_thresholds(read, settings.score)
    least = (read.nms[0] if isinstance(read, OnnxGraph) else None) or 0.0
    score = max(min(thresholds), least) if settings.score in (None, "best") else thresholds[0]
    rules = DetectorConfig(settings.precision, score, settings.nms_iou)
    classes, backend = class_names(read), open_detector(read, opened, rules)
    tiling = tiling_of(config, read.tiling)
    if tiling is not None and config.data.tile is None:
        how = "as it was trained" if tiling == read.tiling else f"overlap {tiling.overlap:g}"
        log.info("detecting in tiles of %d pixels, %s (--tile 0: off)", tiling.size, how)
    detector = ImageDetector(backend, classes, settings, tiling, thresholds)
    return detector, f"ssd300-{read.architecture.backbone}"


def fit_to_graph(checkpoint: ModelFile, config: Config) -> Config:
    """Replace settings of files and variables that an ONNX file has fixed in another way."""
    if not isinstance(checkpoint, OnnxGraph):
        return config
    values: dict[str, Any] = {"predict.precision": "fp32", "evaluate.precision": "fp32"}
    least, iou = checkpoint.nms
    if least is not None:
        values |= {"predict.nms_iou": iou, "evaluate.nms_iou": iou}
        low = config.evaluate.score_threshold
        scores = {"predict.score": config.predict.score, "evaluate.score_threshold": low}
        values |= {k: max(v, least) for k, v in scores.items() if isinstance(v, float)}
    return config.with_defaults(values)


def score_thresholds(checkpoint: ModelFile, score: float | str | None) -> list[float]:
    """Return the threshold of each class for `--score`; None is `best` if the file has it.

    Raises:
        UsageError: `best`, and the checkpoint has no thresholds.
    """
    best, count = checkpoint.thresholds, checkpoint.architecture.num_classes - 1
    if isinstance(score, float | int):
        return [score] * count
    if any(threshold is not None for threshold in best):
        found = [DEFAULT_SCORE if threshold is None else threshold for threshold in best]
        log.info(
            "score thresholds: each class's best F1 in the run's evaluation, %.2f to %.2f "
            "(--score X for another)",
            min(found),
            max(found),
        )
        return found
    if score == "best":
        raise UsageError(
            f"{checkpoint.path}: has no score thresholds: it was not evaluated, or found nothing",
            hint=f"give one: --score {DEFAULT_SCORE}",
        )
    return [DEFAULT_SCORE] * count


def class_names(checkpoint: ModelFile) -> list[ClassName]:
    """Return the classes of a checkpoint; numbered if a third-party file does not name them."""
    if checkpoint.classes:
        return checkpoint.classes
    count = checkpoint.architecture.num_classes - 1
    log.info("%s does not name its %d classes: they are numbered", checkpoint.path, count)
    return numbered_classes(count)
