"""ResNet-152 (He et al. 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = RESNET
PARAMETERS = (47_447_864, 124_446)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet152-394f9c45", "torchvision V1"),
    "imagenet-v2": torchvision_weights("resnet152-f82ba261", "torchvision V2"),
}


def build() -> Backbone:
    from ssdctl.model.resnet import Bottleneck, ResNetBackbone

    return ResNetBackbone(Bottleneck, (3, 8, 36, 3))
