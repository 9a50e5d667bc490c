"""Conventions of a network in addition to its layers: pixel scaling, matching, loss, detection.

These are data of an architecture. Input, loss and post-processing read them and have no branches
for single networks. The default boxes are the same for all (`ssdctl/boxes/default_boxes.py`).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Conventions(NamedTuple):
    """The constants around a network."""

    mean: tuple[float, float, float]  # of RGB in 0 to 1
    std: tuple[float, float, float]
    matches_at_threshold: bool  # whether an IoU equal to the threshold makes a box positive
    loss_divisor: Literal["image", "batch"]  # positives of each image, or of the whole batch
    score_threshold: float  # of an evaluation, unless the user sets another one
    nms_iou: float
    candidates_per_class: int  # the best before NMS
    clips_boxes: bool  # to the picture, before NMS


# MLPerf, Habana, NVIDIA, DALI.
RESNET = Conventions(
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    matches_at_threshold=False,
    loss_divisor="image",
    score_threshold=0.05,
    nms_iou=0.5,
    candidates_per_class=200,
    clips_boxes=False,
)

# torchvision.models.detection.ssd300_vgg16.
TORCHVISION_VGG16 = Conventions(
    mean=(0.48235, 0.45882, 0.40784),
    std=(1 / 255, 1 / 255, 1 / 255),
    matches_at_threshold=True,
    loss_divisor="batch",
    score_threshold=0.01,
    nms_iou=0.45,
    candidates_per_class=400,
    clips_boxes=True,
)


def conventions_of(backbone: str) -> Conventions:
    """Return the constants of the networks on a backbone."""
    return TORCHVISION_VGG16 if backbone == "vgg16" else RESNET


def conventions_of_model(model: Any) -> Conventions:
    """Return the constants of a network; those of the ResNets for one that names none."""
    conventions: Conventions = getattr(model, "conventions", RESNET)
    return conventions
