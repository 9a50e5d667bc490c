"""ResNet-101 (He et al. 2015)."""

from functools import partial

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones._resnet import build_resnet
from ssdctl.model.constants import RESNET

CONSTANTS = RESNET
PARAMETERS = (31_804_216, 124_446)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet101-63fe2227", "torchvision V1"),
    "imagenet-v2": torchvision_weights("resnet101-cd907fc2", "torchvision V2"),
}
build = partial(build_resnet, (3, 4, 23, 3), bottleneck=True)
