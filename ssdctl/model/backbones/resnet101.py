"""ResNet-101 (He et al. 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = RESNET
PARAMETERS = (31_804_216, 124_446)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet101-63fe2227", "torchvision V1"),
    "imagenet-v2": torchvision_weights("resnet101-cd907fc2", "torchvision V2"),
}


def build() -> Backbone:
    from ssdctl.model.resnet import Bottleneck, ResNetBackbone

    return ResNetBackbone(Bottleneck, (3, 4, 23, 3))
