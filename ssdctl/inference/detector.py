"""Detect objects with a network: pixels in, detections out.

    detector = Detector(model, device, DetectorConfig(score_threshold=0.05, nms_iou=0.5))
    for name, detections in detect_batches(detector, [("a.jpg", pixels)]): ...

`detect_batches` is the one inference loop: of images, tiles, videos and evaluation.
Shapes: B batch, C classes with background, N default boxes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ssdctl.boxes import default_boxes_cxcywh
from ssdctl.device import Device
from ssdctl.errors import NonFiniteError, UsageError
from ssdctl.input.normalize import Normalize
from ssdctl.model.backbones import constants_of_model
from ssdctl.model.postprocess import (
    ImageDetections,
    detect,
    evaluating,
    refuse_non_finite,
)
from ssdctl.runtime.system import map_ahead, thread_pool

T = TypeVar("T")


class DetectorConfig(NamedTuple):
    """The settings of a detector.

    Detections score more than `score_threshold`. A box that overlaps a better one of its class by
    more than `nms_iou` is dropped. None uses the network's default.
    """

    precision: str = "fp32"
    score_threshold: float | None = None
    nms_iou: float | None = None


DEFAULTS = DetectorConfig()


class DetectorBackend(Protocol):
    """The interface of detectors for `predict` and `evaluate`."""

    score_threshold: float
    nms_iou: float
    device: Device

    def forward(self, images_BHW3: Tensor) -> tuple[Tensor, ...]:
        """Run the network; the first dimension of each tensor is the batch."""
        ...

    def finish(self, output: tuple[Tensor, ...]) -> list[ImageDetections]:
        """Decode the output of `forward`; may run in another thread."""
        ...


class Detector:
    """Run a network in PyTorch, in evaluation mode, and decode its output; its mode is restored.

    Raises:
        UsageError: The device does not compute in that precision.
    """

    def __init__(self, model: nn.Module, device: Device, config: DetectorConfig = DEFAULTS) -> None:
        if config.precision not in device.precisions:
            raise UsageError(
                f"device {device.name} does not compute in {config.precision}",
                hint=f"choose {' or '.join(f'--{p}' for p in device.precisions)}",
            )
        self.model = model
        self.device = device
        self._precision = config.precision
        self._defaults = default_boxes_cxcywh().to(device.torch_device)
        constants = constants_of_model(model)
        self.score_threshold, self.nms_iou = constants.thresholds(
            config.score_threshold, config.nms_iou
        )
        self._rules = constants._replace(score_threshold=self.score_threshold, nms_iou=self.nms_iou)
        self._normalize = Normalize(constants.mean, constants.std).to(device.torch_device)

    def __call__(self, images_BHW3: Tensor) -> list[ImageDetections]:
        """Return the detections on (B, 300, 300, 3) uint8 RGB images, in fractions of each."""
        return self.finish(self.forward(images_BHW3))

    def forward(self, images_BHW3: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's offsets (B, 4, N) and logits (B, C, N).

        Returns before an accelerator has finished.
        """
        # Lazy devices refuse inference tensors, hence no_grad.
        with torch.no_grad(), evaluating(self.model), self._out_of_memory_hints(len(images_BHW3)):
            if images_BHW3.device.type == "cpu" and not self.device.is_host:
                images_BHW3 = self.device.copy(images_BHW3)  # while the previous batch is computed
                self.device.wait_for_copies()
            images = self._normalize(images_BHW3)
            with self.device.autocast(self._precision):
                offsets, logits = self.model(images)
            self.device.mark_step()
            return offsets, logits

    def finish(self, output: tuple[Tensor, ...]) -> list[ImageDetections]:
        offsets, logits = output
        with torch.no_grad(), self._out_of_memory_hints(len(offsets)):
            refuse_non_finite(output)
            return detect(offsets, logits, self._defaults, self._rules)

    @contextlib.contextmanager
    def _out_of_memory_hints(self, num_images: int) -> Iterator[None]:
        """Replace the device's error that its memory is full by one that names a smaller batch."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self.device.is_out_of_memory(error):
                raise
            hint = "another process may use the device; --device cpu evaluates without it"
            if fewer := num_images // 2:
                option = f"in training --set evaluate.batch_size={fewer}"
                hint = f"take {fewer}: --bs of evaluate and predict; {option}"
            raise UsageError(
                f"out of memory on device {self.device.name} ({self.device.label}) while detecting "
                f"on {num_images} images at a time",
                hint=hint,
            ) from error


def detect_batches(
    detector: DetectorBackend,
    batches: Iterable[tuple[T, Tensor]],
    *,
    min_batch: int = 1,
    ahead: int = 0,
    on_output: Callable[[T, tuple[Tensor, ...]], None] | None = None,
    describe: Callable[[T], str] | None = None,
) -> Iterator[tuple[T, list[ImageDetections]]]:
    """Run a network on batches of images; yield the item of each batch and its detections.

    Args:
        detector: The network.
        batches: An item that names the images, and the images, (B, 300, 300, 3) uint8 RGB.
        min_batch: A smaller batch is filled with its first image, whose further detections are
            left out.
        ahead: Outputs that a thread decodes while the network runs on; 0: no thread.
        on_output: Called with the output of each batch, filled, before it is decoded.
        describe: Names the images of a batch in errors.

    Raises:
        NonFiniteError: The network's output is NaN or infinite.
    """
    finished = functools.partial(_finished, detector, describe)
    outputs = _outputs(detector, batches, min_batch, on_output)
    if not ahead:
        yield from map(finished, outputs)
        return
    with thread_pool(1, "detect") as pool:
        yield from map_ahead(pool, finished, outputs, ahead)


def _finished(
    detector: DetectorBackend,
    describe: Callable[[T], str] | None,
    entry: tuple[T, tuple[Tensor, ...]],
) -> tuple[T, list[ImageDetections]]:
    try:
        return entry[0], detector.finish(entry[1])
    except NonFiniteError as error:
        if describe is None:
            raise
        images = describe(entry[0])
        raise NonFiniteError(f"{error} (images {images})", hint=error.hint) from None


def _outputs(
    detector: DetectorBackend,
    batches: Iterable[tuple[T, Tensor]],
    min_batch: int,
    on_output: Callable[[T, tuple[Tensor, ...]], None] | None,
) -> Iterator[tuple[T, tuple[Tensor, ...]]]:
    for item, images_BHW3 in batches:
        missing = max(min_batch - len(images_BHW3), 0)
        filler = images_BHW3[:1].expand(missing, -1, -1, -1)
        output = detector.forward(torch.cat([images_BHW3, filler]) if missing else images_BHW3)
        if on_output is not None:
            on_output(item, output)
        yield item, tuple(t[: len(images_BHW3)] for t in output)
