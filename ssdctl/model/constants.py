"""The constants of a network in addition to its layers: pixel scaling, matching, loss, detection.

Input, loss and post-processing read them and have no branches for single networks. The default
boxes are the same for all (`ssdctl/boxes/default_boxes.py`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class ModelConstants(NamedTuple):
    """Per-architecture constants that are not parameters."""

    mean: tuple[float, float, float]  # RGB in 0 to 1
    std: tuple[float, float, float]
    matches_at_threshold: bool  # whether an IoU equal to the threshold makes a box positive
    loss_divisor: Literal["image", "batch"]  # positives of each image, or of the whole batch
    score_threshold: float  # in evaluation, unless the user sets another one
    nms_iou: float
    candidates_per_class: int  # the best before NMS
    clips_boxes: bool  # to the image, before NMS

    def thresholds(self, score: float | None, nms_iou: float | None) -> tuple[float, float]:
        """Return the thresholds of score and NMS; None becomes the network's own."""
        return (
            self.score_threshold if score is None else score,
            self.nms_iou if nms_iou is None else nms_iou,
        )


# The ResNets of MLPerf, Habana, NVIDIA and DALI.
RESNET = ModelConstants(
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    matches_at_threshold=False,
    loss_divisor="image",
    score_threshold=0.05,
    nms_iou=0.5,
    candidates_per_class=200,
    clips_boxes=False,
)


def constants_of_model(model: Any) -> ModelConstants:
    """Return the constants of a network; those of the ResNets for one that names none."""
    constants: ModelConstants = getattr(model, "constants", RESNET)
    return constants
