"""VGG16 as in the SSD paper, with the constants of torchvision.models.detection.ssd300_vgg16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import ModelConstants

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = ModelConstants(
    mean=(0.48235, 0.45882, 0.40784),
    std=(1 / 255, 1 / 255, 1 / 255),
    matches_at_threshold=True,
    loss_divisor="batch",
    score_threshold=0.01,
    nms_iou=0.45,
    candidates_per_class=400,
    clips_boxes=True,
)
PARAMETERS = (23_478_584, 133_662)
EXTRA_NORMS = ("none",)
WEIGHTS = {
    "imagenet-v1": torchvision_weights(
        "vgg16_features-amdegroot-88682ab5", "torchvision; SSD300-VGG16 starts from it"
    ),
}


def build() -> Backbone:
    from ssdctl.model.vgg import VGG16

    return VGG16()
