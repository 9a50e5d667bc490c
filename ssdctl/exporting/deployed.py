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

from ssdctl.boxes.default_boxes import IMAGE_SIZE, default_boxes_cxcywh
from ssdctl.checkpoint.reader import Checkpoint, load_network
from ssdctl.errors import IntegrityError
from ssdctl.inference.detector import refuse_non_finite
from ssdctl.inference.onnx_detector import DECODED, HEADS, filled_batches
from ssdctl.model.constants import ModelConstants
from ssdctl.model.normalize import Normalize
from ssdctl.model.postprocess import boxes_and_scores, detect

TOLERANCE = 1e-3  # of scores, and of boxes in fractions of the image
TOLERANCE_FP16 = 1e-2
# Share of detections: at an overlap of almost exactly the threshold, rounding decides.
MAX_DIFFERENT = 0.01
MAX_DIFFERENT_FP16 = 0.05

Nms = Literal["onnx", "none", "efficientnms", "raw"]
Pictures = NDArray[np.uint8]
Runner = Callable[[Pictures], list[NDArray[Any]]]


class ExportOptions(NamedTuple):
    """What an exported file computes.

    Args:
        nms: The outputs; see the module.
        batch: Images of a call; None: any number.
        is_fp16: Store the weights of convolutions in half precision; the arithmetic is fp32.
        score_threshold, nms_iou: Of NMS. None: the network's own.
    """

    nms: Nms = "onnx"
    batch: int | None = None
    is_fp16: bool = False
    score_threshold: float | None = None
    nms_iou: float | None = None

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs before NMS."""
        return HEADS if self.nms == "raw" else DECODED

    @property
    def has_nms(self) -> bool:
        return self.nms in ("onnx", "efficientnms")

    def thresholds(self, constants: ModelConstants) -> tuple[float, float]:
        """Return the score threshold and the IoU of NMS."""
        return constants.thresholds(self.score_threshold, self.nms_iou)


class Comparison(NamedTuple):
    """The difference between another runtime's outputs and PyTorch's."""

    pictures: int
    box_difference: float  # the largest, in fractions of the image
    score_difference: float
    # OpenVINO without INFERENCE_PRECISION_HINT; None: of other runtimes.
    default_precision: str | None = None
    default_box_difference: float | None = None
    default_score_difference: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the values that exist."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class Deployed(nn.Module):
    """Compute boxes and scores, or the raw heads, from uint8 images.

    Args:
        checkpoint: Of the weights.
        options: The outputs, and the precision of the weights.
    """

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
        return (
            boxes_and_scores(
                offsets,
                logits,
                self.defaults,
                clips_boxes=self.network.constants.clips_boxes,
            )
            if self.is_decoded
            else (offsets, logits)
        )


class HalfConv2d(nn.Conv2d):
    """Convolve in fp32 with weights that are stored in fp16."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight.float(), self.bias)


def example(options: ExportOptions) -> Tensor:
    """Return images to trace with; an exporter treats a batch of 1 as a constant."""
    return torch.zeros(options.batch or 2, IMAGE_SIZE, IMAGE_SIZE, 3, dtype=torch.uint8)


def in_batches(run: Runner, pictures: Pictures, batch: int | None) -> list[NDArray[Any]]:
    """Run a model on images in batches of its size, or of 1 and of the others."""
    if batch is None:
        parts = [run(pictures[:1]), run(pictures[1:])]
    else:
        parts = [run(filled) for filled in filled_batches(pictures, batch)]
    return [np.concatenate(arrays)[: len(pictures)] for arrays in zip(*parts, strict=True)]


class Reference:
    """PyTorch's results on images, to compare another runtime's with.

    Args:
        checkpoint: Of the weights, in full precision.
        pictures: (P, 300, 300, 3) RGB; at least 2, to check that the batch varies.
        options: Of the exported file.
        runtime: Its name, for messages.

    Raises:
        NonFiniteError: PyTorch's results are NaN or infinite.
    """

    def __init__(
        self, checkpoint: Checkpoint, pictures: Pictures, options: ExportOptions, runtime: str
    ) -> None:
        network = load_network(checkpoint).eval()
        self._constants = network.constants
        self._normalize = Normalize(network.constants.mean, network.constants.std)
        self._pictures = pictures
        self._options = options
        self._runtime = runtime
        self._tolerance = TOLERANCE_FP16 if options.is_fp16 else TOLERANCE
        pixels = self._normalize(torch.from_numpy(pictures))
        with torch.inference_mode():
            self._offsets, self._logits = network(pixels)
        refuse_non_finite((self._offsets, self._logits))

    def check_outputs(self, run: Runner) -> Comparison:
        """Compare all boxes and scores of the network.

        Args:
            run: Returns the outputs before NMS.

        Raises:
            IntegrityError: They differ.
        """
        comparison = self.compare(run)
        differences = comparison.box_difference, comparison.score_difference
        if not all(value <= self._tolerance for value in differences):  # NaN fails too
            raise self._error(
                f"{self._runtime} differs from PyTorch by {differences[0]:.2g} in boxes and "
                f"{differences[1]:.2g} in scores"
            )
        return comparison

    def compare(self, run: Runner) -> Comparison:
        """Return the differences of all boxes and scores; NaN if the shapes differ."""
        outputs = in_batches(run, self._pictures, self._options.batch)
        exported = torch.from_numpy(outputs[0]), torch.from_numpy(outputs[1])
        with torch.inference_mode():
            if self._options.nms == "raw":
                exported = self._decoded(*exported)
            expected = self._decoded(self._offsets, self._logits)
        differences = [
            float((a - b).abs().max()) if a.shape == b.shape else float("nan")
            for a, b in zip(expected, exported, strict=True)
        ]
        boxes, scores = differences
        return Comparison(len(self._pictures), boxes, scores)

    def check_detections(self, run: Runner) -> None:
        """Compare the detections after NMS.

        Raises:
            IntegrityError: They differ.
        """
        score_threshold, nms_iou = self._options.thresholds(self._constants)
        with torch.inference_mode():
            expected = detect(
                self._offsets,
                self._logits,
                default_boxes_cxcywh(),
                score_threshold=score_threshold,
                nms_iou=nms_iou,
                candidates=self._constants.candidates_per_class,
                clips_boxes=self._constants.clips_boxes,
            )
        exported = in_batches(run, self._pictures, self._options.batch)
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

    def _decoded(self, offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return boxes_and_scores(
            offsets, logits, default_boxes_cxcywh(), clips_boxes=self._constants.clips_boxes
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
