"""The network as other runtimes run it, and its comparison with PyTorch before a file is written.

Input `images`: (B, 300, 300, 3) uint8 RGB images; normalization is inside. By `outputs`:

- `onnx`: `boxes` (B, 200, 4) ltrb in fractions of the image, `scores` and `labels` (B, 200), the
  best first and padded with label 0, `count` (B)
- `none`: `all_boxes` (B, 8732, 4), `all_scores` (B, C - 1, 8732) without background
- `raw`: `offsets` (B, 4, 8732) and `logits` (B, C, 8732)
- `efficientnms`: the outputs of TensorRT's plugin EfficientNMS_TRT
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ssdctl.boxes import default_boxes_cxcywh
from ssdctl.checkpoint.format import NetworkWeights
from ssdctl.data import shapes
from ssdctl.data.image_decode import resized
from ssdctl.data.open_dataset import annotations_with_images
from ssdctl.data.store import open_splits
from ssdctl.device import open_device
from ssdctl.errors import DataError, IntegrityError
from ssdctl.files import temporary_folder
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.inference.image_detector import open_image
from ssdctl.inference.onnx_detector import DECODED, HEADS, filled_batches
from ssdctl.input.normalize import Normalize
from ssdctl.model.backbones import ModelConstants, find_backbone
from ssdctl.model.postprocess import boxes_and_scores, refuse_non_finite
from ssdctl.model.ssd300 import load_network

TOLERANCE = 1e-3  # scores, and boxes in fractions of the image, or of the box if that is larger
TOLERANCE_FP16 = 1e-2
# Share of detections: at an overlap of almost exactly the threshold, rounding decides.
MAX_DIFFERENT = 0.01
MAX_DIFFERENT_FP16 = 0.05
NUM_IMAGES = 5  # images for the comparison
MAX_TRIED = 10  # images of the dataset that are opened for each that is needed

Outputs = Literal["onnx", "none", "efficientnms", "raw"]
Images = NDArray[np.uint8]
Runner = Callable[[Images], list[NDArray[Any]]]
# The largest `box_difference`, in fractions of the image, and `score_difference` to PyTorch.
Differences = dict[str, Any]


class Deployment(NamedTuple):
    """A network, and the outputs of its exported file."""

    checkpoint: NetworkWeights
    outputs: Outputs = "onnx"
    batch: int | None = None  # images of a call; None: any number
    is_fp16: bool = False  # the weights of convolutions; the network computes in fp32
    score_threshold: float | None = None  # None: the network's own
    nms_iou: float | None = None

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs before NMS."""
        return HEADS if self.outputs == "raw" else DECODED

    @property
    def has_nms(self) -> bool:
        return self.outputs in ("onnx", "efficientnms")

    @property
    def constants(self) -> ModelConstants:
        return find_backbone(self.checkpoint.architecture.backbone).CONSTANTS

    @property
    def thresholds(self) -> tuple[float, float]:
        """The score threshold and the IoU of NMS."""
        return self.constants.thresholds(self.score_threshold, self.nms_iou)

    def decoded(self, offsets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        return boxes_and_scores(
            offsets, logits, default_boxes_cxcywh(), clips_boxes=self.constants.clips_boxes
        )


class Deployed(nn.Module):
    """Compute boxes and scores, or the raw heads, from uint8 images."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__()
        self.network = load_network(deployment.checkpoint).eval().requires_grad_(False)
        if deployment.is_fp16:
            for module in self.network.modules():
                if isinstance(module, nn.Conv2d):
                    module.weight.data = module.weight.data.half()
                    module.__class__ = HalfConv2d
        for module in list(self.network.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, FixedBatchNorm(child))
        self.is_decoded = deployment.outputs != "raw"
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


class FixedBatchNorm(nn.Module):
    """Batch norm with fixed statistics: one scale and shift, which runtimes fold into convolutions.

    torch 2.6 cannot export the operator itself to ONNX.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
        shift = norm.bias.double() - norm.running_mean.double() * scale
        self.register_buffer("scale", scale.float()[:, None, None])
        self.register_buffer("shift", shift.float()[:, None, None])

    def forward(self, input: Tensor) -> Tensor:
        return input * self.scale + self.shift


class HalfConv2d(nn.Conv2d):
    """Convolve in fp32 with weights that are stored in fp16."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight.float(), self.bias)


class Reference:
    """PyTorch's results on images, to compare another runtime's with.

    The images are (P, 300, 300, 3) RGB; at least 2, to check that the batch varies.
    """

    def __init__(self, deployment: Deployment, images: Images, runtime: str) -> None:
        config = DetectorConfig("fp32", deployment.score_threshold, deployment.nms_iou)
        network = load_network(deployment.checkpoint)
        self._detector = Detector(network, open_device("cpu"), config)
        self._output = self._detector.forward(torch.from_numpy(images))
        refuse_non_finite(self._output)
        self._deployment, self._images, self._runtime = deployment, images, runtime
        self._tolerance = TOLERANCE_FP16 if deployment.is_fp16 else TOLERANCE

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
        if self._deployment.outputs == "raw":
            exported = self._deployment.decoded(*exported)
        expected = self._deployment.decoded(*self._output)
        if [a.shape for a in expected] != [b.shape for b in exported]:
            return dict.fromkeys(("box_difference", "score_difference"), float("nan"))
        boxes, scores = ((a - b).abs() for a, b in zip(expected, exported, strict=True))
        boxes = boxes / torch.from_numpy(_scale(expected[0].numpy()))
        return {"box_difference": float(boxes.max()), "score_difference": float(scores.max())}

    def check_detections(self, run: Runner) -> None:
        """Compare the detections after NMS; IntegrityError if they differ."""
        expected = self._detector.finish(self._output)
        exported = self._run(run)
        total = wrong = 0
        for reference, boxes, scores, labels, count in zip(expected, *exported, strict=True):
            n = int(count)
            a = (boxes[:n], scores[:n], labels[:n])
            b = tuple(tensor.numpy() for tensor in reference)
            wrong += self._unmatched(a, b) + self._unmatched(b, a)
            total += n + len(reference.scores)
        most = MAX_DIFFERENT_FP16 if self._deployment.is_fp16 else MAX_DIFFERENT
        if wrong > most * total:
            raise self._error(
                f"{wrong} of {total} detections differ between {self._runtime} and PyTorch"
            )

    def _run(self, run: Runner) -> list[NDArray[Any]]:
        """Run a model on the images; with any batch size, on one image and on the others."""
        images, batch = self._images, self._deployment.batch
        batches = [images[:1], images[1:]] if batch is None else filled_batches(images, batch)
        outputs = zip(*map(run, batches), strict=True)
        return [np.concatenate(arrays)[: len(images)] for arrays in outputs]

    def _unmatched(self, a: tuple[NDArray[Any], ...], b: tuple[NDArray[Any], ...]) -> int:
        is_same = (
            (
                (np.abs(a[0][:, None] - b[0][None]) / _scale(a[0])[:, None]).max(axis=2, initial=0)
                <= self._tolerance
            )
            & (np.abs(a[1][:, None] - b[1][None]) <= self._tolerance)
            & (a[2][:, None] == b[2][None])
        )
        return int((~is_same.any(axis=1)).sum())

    def _error(self, message: str) -> IntegrityError:
        hint = f"another version of {self._runtime} or torch may agree"
        if self._deployment.is_fp16:
            hint = (
                "leave --fp16 out: rounding the weights may change this network's results so much"
            )
        return IntegrityError(f"{message}; nothing was written", hint=hint)


def _scale(boxes: NDArray[Any]) -> NDArray[Any]:
    """Return each box's longer side, (..., 1), at least 1: what rounding grows with.

    No loss bounds the boxes of the background.
    """
    sides = np.abs(boxes[..., 2:] - boxes[..., :2])
    return sides.max(axis=-1, keepdims=True, initial=1)


def images_of(root: Path, store: Path) -> tuple[Images, str]:
    """Return images for the comparison of two programs, and their source."""
    parts = (dataset_images(root, store, NUM_IMAGES, (split,)) for split in ("val", "train"))
    images = list(itertools.islice(itertools.chain.from_iterable(parts), NUM_IMAGES))
    if len(images) == NUM_IMAGES:
        return np.stack([resized(image) for image in images]), str(root)
    with temporary_folder("ssdctl-export-") as generated:
        shapes.generate(generated, num_train=1, num_val=NUM_IMAGES)
        files = sorted((generated / "val2017").iterdir())
        return np.stack([resized(open_image(file)) for file in files]), "generated shapes"


def dataset_images(
    root: Path, store: Path, count: int, names: tuple[str, ...] = ("val", "train")
) -> Iterator[Image.Image]:
    """Return `count` images, or fewer, that open: of the store, evenly spaced, else of the files.

    They are of the first split in `names` that the dataset has.
    """
    return itertools.islice(_readable_images(root, store, count, names), count)


def _readable_images(
    root: Path, store: Path, count: int, names: tuple[str, ...]
) -> Iterator[Image.Image]:
    with contextlib.suppress(DataError, OSError, StopIteration):
        try:
            splits = open_splits(root, store)
        except DataError:
            read = annotations_with_images(root, store)
            own = next(read[name] for name in names if name in read)
            sources: Iterator[Any] = (own.folder / name for name in sorted(own.file_names))
        else:
            split = next(splits[name] for name in names if name in splits)
            rows = range(0, len(split.image_ids), max(len(split.image_ids) // count, 1))
            sources = (io.BytesIO(split.read(row)) for row in rows)
        for source in itertools.islice(sources, MAX_TRIED * count):
            with contextlib.suppress(DataError):
                yield open_image(source)
