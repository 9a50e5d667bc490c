"""ResNet-50 (He et al. 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = RESNET
PARAMETERS = (12_812_088, 124_446)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "19c8e357": torchvision_weights("resnet50-19c8e357", "torchvision before 0.9"),
    "imagenet-v1": torchvision_weights(
        "resnet50-0676ba61",
        "torchvision V1; SSD300 of NVIDIA's recipe: AP 0.251",
        "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
        102_530_333,
    ),
    "imagenet-v2": torchvision_weights(
        "resnet50-11ad3fa6", "torchvision V2; nvidia-r50 starts from it: AP 0.268"
    ),
}


def build() -> Backbone:
    from ssdctl.model.resnet import Bottleneck, ResNetBackbone

    return ResNetBackbone(Bottleneck, (3, 4, 6, 3))
