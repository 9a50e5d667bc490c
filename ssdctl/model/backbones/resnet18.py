"""ResNet-18 (He et al. 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = RESNET
PARAMETERS = (6_578_360, 92_190)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet18-f37072fd", "torchvision V1"),
}


def build() -> Backbone:
    from ssdctl.model.resnet import BasicBlock, ResNetBackbone

    return ResNetBackbone(BasicBlock, (2, 2, 2, 2), last_channels=128)
