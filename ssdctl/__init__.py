"""Train, evaluate and deploy SSD300 detectors. Importing this package does not import torch.

import ssdctl

for detection in ssdctl.load("runs/stable-r34").predict("street.jpg"):
    print(detection.name, detection.score, detection.box)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssdctl._version import __version__

if TYPE_CHECKING:
    from ssdctl.inference.predict import Predictor

logging.getLogger(__name__).addHandler(logging.NullHandler())  # applications add theirs

__all__ = ["__version__", "load"]


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str = "auto",
    score: float = 0.3,
    nms_iou: float | None = None,
    precision: str = "fp32",
    classes: Sequence[str] = (),
    max_detections: int | None = None,
    tile: int | None = None,
    tile_overlap: float = 0.2,
) -> Predictor:
    """Load a detector from a checkpoint, ready to predict.

    Args:
        checkpoint: A checkpoint of ssdctl or a third-party one (MLPerf, Habana, NVIDIA,
            torchvision); a `.safetensors` or `.onnx` file of `ssdctl export`; a run folder: its
            best checkpoint, else its last; a detector's name, as
            `ssd300-vgg16-coco`; or a model on the Hugging Face Hub, as `hf://org/name@v1`.
        device: `auto` is the accelerator of this machine, else the CPU.
        score: Return only detections with a score above this, 0 to 1.
        nms_iou: Drop a box if its IoU with a better one of its class is above this, 0 to 1.
            None: the convention of the network (0.5; VGG16 0.45).
        precision: `fp32` or `bf16`.
        classes: The names of the classes to return; empty: all.
        max_detections: How many detections of a picture are returned, the best; None: all.
        tile: Detect on tiles of so many pixels and on the whole picture, and merge; for pictures
            of which the objects are small. None: only the whole picture.
        tile_overlap: Overlap of neighbouring tiles, as a fraction of a tile, 0 to 0.9.

    Raises:
        ssdctl.errors.UsageError: The file, device, precision or a class does not exist.
        ssdctl.errors.NetworkError: The detector or model cannot be fetched.
        ssdctl.errors.IntegrityError: The file is damaged, not a checkpoint, or would run code.
    """
    from ssdctl.inference import predict  # late: torch takes seconds

    return predict.load(
        checkpoint,
        device=device,
        score=score,
        nms_iou=nms_iou,
        precision=precision,
        options=predict.Options(classes, max_detections, tile, tile_overlap),
    )
