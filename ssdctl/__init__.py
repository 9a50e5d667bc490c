"""ssdctl: train, evaluate and ship SSD300 detectors. Importing it never imports torch.

import ssdctl

for found in ssdctl.load("runs/stable-r34").predict("street.jpg"):
    print(found.name, found.score, found.box)
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
    """Return a detector that is ready for pictures.

    Args:
        checkpoint: A checkpoint, ours or a peer's (MLPerf, Habana, NVIDIA), or a run folder: its
            best checkpoint, else its last.
        device: `auto` is the accelerator that this machine has, else the CPU.
        score: Detections score more than this, 0 to 1.
        nms_iou: A box that overlaps a better one of its class by more (IoU) is dropped.
            None: the network's convention (0.5; VGG16 0.45).
        precision: `fp32` or `bf16`.
        classes: The names of the classes to return; empty: all.
        max_detections: How many detections of a picture are returned, the best; None: all.
        tile: Detect on tiles of so many pixels and on the whole picture, and merge; for pictures
            of which the objects are small. None: only the whole picture.
        tile_overlap: Overlap of neighbouring tiles, as a fraction of a tile, 0 to 0.9.

    Raises:
        ssdctl.errors.UsageError: No such file, device, precision or class.
        ssdctl.errors.IntegrityError: The file is damaged, no checkpoint, or would run code.
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
