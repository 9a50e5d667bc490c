"""ResNet-18 (He et al. 2015)."""

from functools import partial

from ssdctl.download.pinned_files import torchvision_weights
from ssdctl.model.backbones._resnet import build_resnet
from ssdctl.model.constants import RESNET

CONSTANTS = RESNET
PARAMETERS = (6_578_360, 92_190)
EXTRA_NORMS = ("none", "batch")
WEIGHTS = {
    "imagenet-v1": torchvision_weights("resnet18-f37072fd", "torchvision V1"),
}
build = partial(build_resnet, (2, 2, 2, 2), last_channels=128)
