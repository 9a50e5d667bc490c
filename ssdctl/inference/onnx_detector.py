"""Detect objects with an ONNX file of `ssdctl export`, by onnxruntime on the CPU or on CUDA.

The outputs of a file are detections (`--nms onnx`), decoded boxes and scores (`--nms none`) or the
raw heads (`--raw`).
Shapes: B batch, C classes with background, N default boxes, K detections of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssdctl.boxes import IMAGE_SIZE, NUM_BOXES, default_boxes_cxcywh
from ssdctl.checkpoint.exported import PACKAGES, read_onnx
from ssdctl.checkpoint.format import OnnxGraph
from ssdctl.device import Device
from ssdctl.errors import IntegrityError, UsageError, import_package
from ssdctl.inference.detector import DEFAULTS, DetectorConfig
from ssdctl.model.backbones import find_backbone
from ssdctl.model.postprocess import (
    ImageDetections,
    boxes_and_scores,
    refuse_non_finite,
    select_detections,
)
from ssdctl.runtime.system import quota_cores

# Names of the outputs: detections, decoded boxes, raw heads.
DETECTIONS = ("boxes", "scores", "labels", "count")
DECODED = ("all_boxes", "all_scores")
HEADS = ("offsets", "logits")
MAX_DETECTIONS = 10_000  # per image in the output of a graph
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


class OnnxDetector:
    """Implement `DetectorBackend` with onnxruntime, on a CPU or CUDA device.

    The precision must be `fp32`: the graph has its own. Thresholds of None are the graph's, else
    the network's own.

    Raises:
        UsageError: The device, precision or a threshold does not suit the graph, or onnxruntime is
            not installed.
        IntegrityError: The graph is damaged or not of an SSD300.
    """

    def __init__(
        self,
        checkpoint: OnnxGraph,
        device: Device,
        config: DetectorConfig = DEFAULTS,
    ) -> None:
        score_threshold, nms_iou = config.score_threshold, config.nms_iou
        if config.precision != "fp32":
            problem = f"{checkpoint.path}: the precision of an ONNX file is fixed"
            raise UsageError(problem, hint="leave it out")
        self.device = device
        self._path = checkpoint.path
        self._arguments = checkpoint.path.absolute(), device, config
        self._num_classes = checkpoint.architecture.num_classes
        self._session = _session(checkpoint, device)
        self._outputs, self._batch = self._check_signature()
        constants = find_backbone(checkpoint.architecture.backbone).CONSTANTS
        self._has_nms = self._outputs == DETECTIONS
        least, iou = checkpoint.nms if self._has_nms else (None, None)
        if self._has_nms and (least is None or iou is None):
            raise IntegrityError(f"{self._path}: its metadata has no thresholds of its NMS")
        if least is not None and score_threshold is not None and score_threshold < least:
            raise UsageError(
                f"{self._path}: its NMS drops scores below {least}, {score_threshold} is lower",
                hint=f"give {least} or more, or export with --score-threshold {score_threshold} or "
                "--nms none",
            )
        if iou is not None and nms_iou not in (None, iou):
            raise UsageError(
                f"{self._path}: its NMS has the IoU threshold {iou}, not {nms_iou}",
                hint=f"export with --nms-iou {nms_iou}, or with --nms none",
            )
        self.score_threshold, self.nms_iou = constants.thresholds(
            least if score_threshold is None else score_threshold,
            iou if nms_iou is None else nms_iou,
        )
        self._rules = constants._replace(score_threshold=self.score_threshold, nms_iou=self.nms_iou)

    def __reduce__(self) -> tuple[Any, ...]:
        """Read the file again in another process."""
        return _opened, self._arguments

    def forward(self, images_BHW3: Tensor) -> tuple[Tensor, ...]:
        """Run the graph; a fixed batch size is filled with repetitions of the last image."""
        images = images_BHW3.cpu().numpy()
        size = self._batch or len(images)
        parts = []
        for filled in filled_batches(images, size):
            try:
                arrays = self._session.run(list(self._outputs), {"images": filled})
            except Exception as error:  # onnxruntime's have no common class
                raise IntegrityError(f"{self._path}: the graph cannot be run: {error}") from error
            if not self._is_valid(arrays, size):
                raise IntegrityError(f"{self._path}: the outputs of the graph have other shapes")
            parts.append(arrays)
        joined = (np.concatenate(p)[: len(images)] for p in zip(*parts, strict=True))
        return tuple(torch.from_numpy(array) for array in joined)

    def finish(self, output: tuple[Tensor, ...]) -> list[ImageDetections]:
        refuse_non_finite(output)
        if self._has_nms:
            return [self._above_threshold(*image) for image in zip(*output, strict=True)]
        boxes, scores = output
        if self._outputs == HEADS:
            boxes, scores = boxes_and_scores(
                boxes, scores, default_boxes_cxcywh(), clips_boxes=self._rules.clips_boxes
            )
        return select_detections(boxes, scores, self._rules)

    def _above_threshold(
        self, boxes_K4: Tensor, scores_K: Tensor, labels_K: Tensor, count: Tensor
    ) -> ImageDetections:
        kept = (torch.arange(len(scores_K)) < count) & (scores_K > self.score_threshold)
        labels = labels_K[kept]
        if not bool(((labels > 0) & (labels < self._num_classes)).all()):
            raise IntegrityError(f"{self._path}: a label of the graph's output is not a class")
        return ImageDetections(boxes_K4[kept], scores_K[kept], labels)

    def _check_signature(self) -> tuple[tuple[str, ...], int | None]:
        """Return the names of the outputs, and the batch size if it is fixed."""
        inputs = self._session.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 else []
        expected = [IMAGE_SIZE, IMAGE_SIZE, 3]
        if shape[1:] != expected or (inputs[0].name, inputs[0].type) != ("images", "tensor(uint8)"):
            raise IntegrityError(f"{self._path}: its input is not `images`, uint8 (B, 300, 300, 3)")
        names = {output.name for output in self._session.get_outputs()}
        for outputs in (DETECTIONS, DECODED, HEADS):
            if names == set(outputs):
                return outputs, shape[0] if isinstance(shape[0], int) else None
        raise IntegrityError(
            f"{self._path}: its outputs are {', '.join(sorted(names))[:200]}, not those of "
            "ssdctl export"
        )

    def _is_valid(self, arrays: list[Any], batch: int) -> bool:
        shapes = [array.shape for array in arrays]
        kinds = "".join(array.dtype.kind for array in arrays)
        most = shapes[1][-1] if self._has_nms and shapes[1] else 0
        expected = {
            HEADS: [(batch, 4, NUM_BOXES), (batch, self._num_classes, NUM_BOXES)],
            DECODED: [(batch, NUM_BOXES, 4), (batch, self._num_classes - 1, NUM_BOXES)],
            DETECTIONS: [(batch, most, 4), (batch, most), (batch, most), (batch,)],
        }[self._outputs]
        return most <= MAX_DETECTIONS and shapes == expected and "ffii".startswith(kinds)


def _opened(path: Path, device: Device, config: DetectorConfig) -> OnnxDetector:
    return OnnxDetector(read_onnx(path), device, config)


def filled_batches(images: NDArray[np.uint8], size: int) -> list[NDArray[np.uint8]]:
    """Split images into batches; the last one is filled with repetitions of the last image."""
    filled = np.concatenate([images, images[-1:].repeat(-len(images) % size, axis=0)])
    return np.split(filled, len(filled) // size)


def _session(checkpoint: OnnxGraph, device: Device) -> Any:
    onnxruntime = import_package("onnxruntime", *PACKAGES)
    providers: list[Any] = [CPU_PROVIDER]
    if device.torch_device.type == "cuda":
        if CUDA_PROVIDER not in onnxruntime.get_available_providers():
            raise UsageError(
                "this onnxruntime does not compute on CUDA",
                hint="pip install onnxruntime-gpu in its place, or use --device cpu",
            )
        providers.insert(0, (CUDA_PROVIDER, {"device_id": device.torch_device.index or 0}))
    elif device.torch_device.type != "cpu":
        raise UsageError(
            f"{checkpoint.path}: onnxruntime does not compute on device {device.name}",
            hint="use --device cpu, or the checkpoint that it was exported from",
        )
    try:
        return open_session(checkpoint.content, providers)
    except Exception as error:  # onnxruntime's have no common class
        raise IntegrityError(
            f"{checkpoint.path}: onnxruntime cannot read the graph: {error}"
        ) from None


def open_session(graph: bytes, providers: Sequence[Any] = (CPU_PROVIDER,)) -> Any:
    """Return onnxruntime's session of a graph, on the cores that this process may use."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = quota_cores() or 0  # 0: all cores
    return onnxruntime.InferenceSession(graph, options, providers=providers)
