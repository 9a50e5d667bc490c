"""The network as other runtimes run it, and its comparison with PyTorch before a file is written.

Input `images`: (B, 300, 300, 3) uint8 RGB images; normalization is inside. Outputs by `nms`:

- `onnx`: `boxes` (B, 200, 4) ltrb in fractions of the image, `scores` and `labels` (B, 200), the
  best first and padded with label 0, `count` (B)
- `none`: `all_boxes` (B, 8732, 4), `all_scores` (B, C - 1, 8732) without background
- `raw`: `offsets` (B, 4, 8732) and `logits` (B, C, 8732)
- `efficientnms`: those of TensorRT's plugin EfficientNMS_TRT
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.boxes import IMAGE_SIZE, default_boxes_cxcywh
from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.file import load_network
from ssdctl.device import open_device
from ssdctl.errors import IntegrityError
from ssdctl.inference.detector import Detector, DetectorConfig, refuse_non_finite
from ssdctl.inference.onnx_detector import DECODED, HEADS, filled_batches
from ssdctl.model.normalize import Normalize
from ssdctl.model.postprocess import boxes_and_scores

TOLERANCE = 1e-3  # scores, and boxes in fractions of the image
TOLERANCE_FP16 = 1e-2
# Share of detections: at an overlap of almost exactly the threshold, rounding decides.
MAX_DIFFERENT = 0.01
MAX_DIFFERENT_FP16 = 0.05

Nms = Literal["onnx", "none", "efficientnms", "raw"]
Images = NDArray[np.uint8]
Runner = Callable[[Images], list[NDArray[Any]]]
# The largest `box_difference`, in fractions of the image, and `score_difference` to PyTorch.
Differences = dict[str, Any]


class ExportOptions(NamedTuple):
    """What an exported file computes.

    `nms` are the outputs (see the module), `batch` the images of a call (None: any number).
    `is_fp16` stores the weights of convolutions in half precision; the network computes in fp32.
    Thresholds of None are the network's own.
    """

    nms: Nms = "onnx"
    batch: int | None = None
    is_fp16: bool = False
    score_threshold: float | None = None
    nms_iou: float | None = None

    @property
    def output_names(self) -> tuple[str, ...]:
        return HEADS if self.nms == "raw" else DECODED

    @property
    def has_nms(self) -> bool:
        return self.nms in ("onnx", "efficientnms")


class Deployed(nn.Module):
    """Compute boxes and scores, or the raw heads, from uint8 images."""

    def __init__(self, checkpoint: Checkpoint, options: ExportOptions) -> None:
        super().__init__()
        self.network = load_network(checkpoint).eval().requires_grad_(False)
        if options.is_fp16:
            for module in self.network.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.data = module.weight.data.half()
                    module.__class__ = HalfConv2d
        self.is_decoded = options.nms != "raw"
        self.normalize = Normalize(self.network.constants.mean, self.network.constants.std)
        self.register_buffer("defaults", default_boxes_cxcywh())
        for module in self.modules():  # torch.export warns of buffers with other strides
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.contiguous())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        offsets, logits = self.network(self.normalize(images))
        assert isinstance(self.defaults, Tensor)
        if not self.is_decoded:
            return offsets, logits
        clips_boxes = self.network.constants.clips_boxes
        return boxes_and_scores(offsets, logits, self.defaults, clips_boxes=clips_boxes)


class HalfConv2d(nn.Conv2d):
    """Convolve in fp32 with weights that are stored in fp16."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight.float(), self.bias)


def example(options: ExportOptions) -> Tensor:
    """Return images to trace with; an exporter treats a batch of 1 as a constant."""
    return torch.zeros(options.batch or 2, IMAGE_SIZE, IMAGE_SIZE, 3, dtype=torch.uint8)


class Reference:
    """PyTorch's results on images, to compare another runtime's with.

    The images are (P, 300, 300, 3) RGB; at least 2, to check that the batch varies.
    """

    def __init__(
        self, checkpoint: Checkpoint, images: Images, options: ExportOptions, runtime: str
    ) -> None:
        network = load_network(checkpoint)
        self._clips_boxes = network.constants.clips_boxes
        config = DetectorConfig("fp32", options.score_threshold, options.nms_iou)
        self._detector = Detector(network, open_device("cpu"), config)
        self._output = self._detector.forward(torch.from_numpy(images))
        refuse_non_finite(self._output)
        self._images, self._options, self._runtime = images, options, runtime
        self._tolerance = TOLERANCE_FP16 if options.is_fp16 else TOLERANCE

    def check_outputs(self, run: Runner) -> Differences:
        """Compare all boxes and scores before NMS; IntegrityError if they differ."""
        found = self.compare(run)
        if not all(value <= self._tolerance for value in found.values()):  # NaN fails too
            raise self._error(
                f"{self._runtime} differs from PyTorch by {found['box_difference']:.2g} in boxes "
                f"and {found['score_difference']:.2g} in scores"
            )
        return found

    def compare(self, run: Runner) -> Differences:
        """Return the differences of all boxes and scores; NaN if the shapes differ."""
        outputs = self._run(run)
        exported = torch.from_numpy(outputs[0]), torch.from_numpy(outputs[1])
        if self._options.nms == "raw":
            exported = self._decoded(*exported)
        expected = self._decoded(*self._output)
        names = "box_difference", "score_difference"
        return {
            name: float((a - b).abs().max()) if a.shape == b.shape else float("nan")
            for name, a, b in zip(names, expected, exported, strict=True)
        }

    def check_detections(self, run: Runner) -> None:
        """Compare the detections after NMS; IntegrityError if they differ."""
        expected = self._detector.finish(self._output)
        exported = self._run(run)
        total = wrong = 0
        for reference, boxes, scores, labels, count in zip(expected, *exported, strict=True):
            n = int(count)
            a = (boxes[:n], scores[:n], labels[:n])
            b = (reference.boxes.numpy(), reference.scores.numpy(), reference.labels.numpy())
            wrong += self._unmatched(a, b) + self._unmatched(b, a)
            total += n + len(reference.scores)
        if wrong > (MAX_DIFFERENT_FP16 if self._options.is_fp16 else MAX_DIFFERENT) * total:
            raise self._error(
                f"{wrong} of {total} detections differ between {self._runtime} and PyTorch"
            )

    def _run(self, run: Runner) -> list[NDArray[Any]]:
        """Run a model on the images in batches of its size, or of 1 and of the others."""
        images, batch = self._images, self._options.batch
        batches = [images[:1], images[1:]] if batch is None else filled_batches(images, batch)
        outputs = zip(*map(run, batches), strict=True)
        return [np.concatenate(arrays)[: len(images)] for arrays in outputs]

    def _decoded(self, offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return boxes_and_scores(
            offsets, logits, default_boxes_cxcywh(), clips_boxes=self._clips_boxes
        )

    def _unmatched(self, a: tuple[NDArray[Any], ...], b: tuple[NDArray[Any], ...]) -> int:
        """Return how many detections of `a` have no counterpart in `b`."""
        is_same = (
            (np.abs(a[0][:, None] - b[0][None]).max(axis=2, initial=0) <= self._tolerance)
            & (np.abs(a[1][:, None] - b[1][None]) <= self._tolerance)
            & (a[2][:, None] == b[2][None])
        )
        return int((~is_same.any(axis=1)).sum())

    def _error(self, message: str) -> IntegrityError:
        return IntegrityError(
            f"{message}; nothing was written",
            hint=f"another version of {self._runtime} or torch may agree",
        )
