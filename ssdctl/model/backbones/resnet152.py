"""ResNet-152 (He et al. 2015)."""

from functools import partial

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones._resnet import build_resnet
from ssdctl.model.constants import RESNET

CONSTANTS = RESNET
PARAMETERS = (47_447_864, 124_446)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet152-394f9c45", "torchvision V1"),
    "imagenet-v2": torchvision_weights("resnet152-f82ba261", "torchvision V2"),
}
build = partial(build_resnet, (3, 8, 36, 3), bottleneck=True)
