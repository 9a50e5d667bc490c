"""ResNet-34 (He et al. 2015)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone

CONSTANTS = RESNET
PARAMETERS = (12_131_896, 96_798)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "333f7ec4": torchvision_weights(
        "resnet34-333f7ec4",
        "torchvision before 0.9; MLPerf and Habana start from it",
        "333f7ec4c6338da2cbed37f1fc0445f9624f1355633fa1d7eab79a91084c6cef",
        87_306_240,
    ),
    "imagenet-v1": torchvision_weights(
        "resnet34-b627a593",
        "torchvision V1",
        "b627a593bcbe140c234610266fe4f8ae95ea42fc881d091c9b6052e6b1d0590f",
    ),
}


def build() -> Backbone:
    from ssdctl.model.resnet import BasicBlock, ResNetBackbone

    return ResNetBackbone(BasicBlock, (3, 4, 6, 3))
