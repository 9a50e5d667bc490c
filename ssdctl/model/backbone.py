"""ResNets cut after conv4_x, as in SSD300: (B, 3, 300, 300) images to a 38 x 38 feature map."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from ssdctl.model.resnet import BUILDERS, BasicBlock, Bottleneck

OUT_CHANNELS = {
    "resnet18": 256,
    "resnet34": 256,
    "resnet50": 1024,
    "resnet101": 1024,
    "resnet152": 1024,
}

STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",))  # what `--freeze N` counts


def build_backbone(name: str) -> nn.Sequential:
    """Return the ResNet up to layer3, with stride 1 in layer3 (38 x 38 cells instead of 19 x 19).

    The modules keep torchvision's names, so its weights load as they are.
    """
    network = BUILDERS[name]()
    first: Any = network.layer3[0]
    # A basic block strides in its first convolution, a bottleneck in its second.
    strided = first.conv1 if isinstance(first, BasicBlock) else first.conv2
    strided.stride = (1, 1)
    first.downsample[0].stride = (1, 1)
    names = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    return nn.Sequential(OrderedDict((name, getattr(network, name)) for name in names))


def freeze_stem(backbone: nn.Sequential) -> None:
    """Stop training conv1 and layer1 up to its first 3x3 convolution, with their batch norms.

    Their running statistics are still updated (as in Habana-TF).
    """
    names = ["conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1"]
    if isinstance(backbone.get_submodule("layer1.0"), Bottleneck):
        names += ["layer1.0.conv2", "layer1.0.bn2"]  # its 3x3 convolution is the second
    for name in names:
        backbone.get_submodule(name).requires_grad_(False)
