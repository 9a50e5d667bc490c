"""Detect objects with a network: pixels in, detections out.

    detector = Detector(model, device, DetectorConfig(score_threshold=0.05, nms_iou=0.5))
    detections = detector(images)

`evaluate`, `predict`, the Python API and the benchmark all use this class.
Shapes: B batch, C classes with background, N default boxes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.device.base import Device
from ssdctl.errors import NonFiniteError, UsageError
from ssdctl.model.constants import constants_of_model
from ssdctl.model.normalize import Normalize
from ssdctl.model.postprocess import ImageDetections, detect


class Output(NamedTuple):
    """The output of the network, before it is decoded."""

    offsets: Tensor  # B x 4 x N
    logits: Tensor  # B x C x N


class DetectorConfig(NamedTuple):
    """The settings of a detector.

    Attributes:
        precision: `fp32` or another that the device computes in.
        score_threshold: Detections score more than this. None: the network's own.
        nms_iou: A box that overlaps one of its class with a higher score by more is dropped.
            None: the network's own.
    """

    precision: str = "fp32"
    score_threshold: float | None = None
    nms_iou: float | None = None


DEFAULTS = DetectorConfig()


class DetectorBackend(Protocol):
    """What `predict` and `evaluate` need of a detector: images in, detections out."""

    score_threshold: float
    nms_iou: float
    device_name: str

    def __call__(self, images_BHW3: Tensor) -> list[ImageDetections]:
        """Return the detections on (B, 300, 300, 3) uint8 RGB images, in fractions of each."""
        ...

    def forward(self, images_BHW3: Tensor) -> tuple[Tensor, ...]:
        """Run the network; the first dimension of each tensor is the batch."""
        ...

    def finish(self, output: tuple[Tensor, ...]) -> list[ImageDetections]:
        """Decode the output of `forward`; may run in another thread."""
        ...


class Detector:
    """Run a network in PyTorch and decode its output.

    Args:
        model: On the device. It should be in evaluation mode.
        device: Where the network is.
        config: The precision and the thresholds.

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
        self.device_name = device.name
        self._device = device
        self._precision = config.precision
        self._defaults = default_boxes_cxcywh().to(device.torch_device)
        self._constants = constants_of_model(model)
        self.score_threshold, self.nms_iou = self._constants.thresholds(
            config.score_threshold, config.nms_iou
        )
        normalize = Normalize(self._constants.mean, self._constants.std)
        self._normalize = normalize.to(device.torch_device)

    def __call__(self, images_BHW3: Tensor) -> list[ImageDetections]:
        """Return the detections on (B, 300, 300, 3) uint8 RGB images, in fractions of each.

        Raises:
            NonFiniteError: The network's output is NaN or infinite.
        """
        return self.finish(self.forward(images_BHW3))

    def forward(self, images_BHW3: Tensor) -> Output:
        """Run only the network; returns before an accelerator has finished."""
        # Lazy devices refuse inference tensors, hence no_grad.
        with torch.no_grad(), self._out_of_memory_hints(len(images_BHW3)):
            if images_BHW3.device.type == "cpu" and not self._device.is_host:
                images_BHW3 = self._device.copy(images_BHW3)  # while the previous batch is computed
                self._device.wait_for_copies()
            images = self._normalize(images_BHW3)
            with self._device.autocast(self._precision):
                output = Output(*self.model(images))
            self._device.mark_step()
            return output

    def finish(self, output: tuple[Tensor, ...]) -> list[ImageDetections]:
        """Decode the output of `forward`; may run in another thread.

        Raises:
            NonFiniteError: It is NaN or infinite.
        """
        offsets, logits = output
        with torch.no_grad(), self._out_of_memory_hints(len(offsets)):
            refuse_non_finite(output)
            return detect(
                offsets,
                logits,
                self._defaults,
                score_threshold=self.score_threshold,
                nms_iou=self.nms_iou,
                candidates=self._constants.candidates_per_class,
                clips_boxes=self._constants.clips_boxes,
            )

    @contextlib.contextmanager
    def _out_of_memory_hints(self, num_images: int) -> Iterator[None]:
        """Replace the device's error that its memory is full by one that names a smaller batch.

        Raises:
            UsageError: The memory is full.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self._device.is_out_of_memory(error):
                raise
            device = f"device {self._device.name} ({self._device.label})"
            if num_images == 1:
                raise UsageError(
                    f"out of memory on {device}: one image does not fit",
                    hint="another process may use the device; --device cpu evaluates without it",
                ) from error
            raise UsageError(
                f"out of memory on {device} while detecting on {num_images} images at a time",
                hint=f"take {num_images // 2}: --bs of evaluate and predict; in training --set "
                f"evaluate.batch_size={num_images // 2}",
            ) from error


def refuse_non_finite(output: tuple[Tensor, ...]) -> None:
    """Raise NonFiniteError if a network's output is NaN or infinite."""
    if not bool(torch.stack([t.isfinite().all() for t in output]).all()):
        raise NonFiniteError(
            "the network's output is NaN or infinite",
            hint="the weights were damaged in training: use an earlier checkpoint",
        )
