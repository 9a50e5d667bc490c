"""ResNets cut after conv4_x, as SSD300 takes them: 3 x 300 x 300 in, a 38 x 38 map out."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torchvision.models import resnet

BUILDERS = {
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "resnet50": resnet.resnet50,
    "resnet101": resnet.resnet101,
    "resnet152": resnet.resnet152,
}
OUT_CHANNELS = {
    "resnet18": 256,
    "resnet34": 256,
    "resnet50": 1024,
    "resnet101": 1024,
    "resnet152": 1024,
}


def freeze_stem(backbone: nn.Sequential) -> None:
    """Stop training conv1, and layer1 up to its first 3x3 convolution, with their batch norms.

    Their statistics go on moving (Habana-TF does the same).
    """
    parts = ["conv1", "bn1", "layer1.0.conv1", "layer1.0.bn1"]
    if isinstance(backbone.get_submodule("layer1.0"), resnet.Bottleneck):
        parts += ["layer1.0.conv2", "layer1.0.bn2"]  # its 3x3 convolution is the second
    for part in parts:
        backbone.get_submodule(part).requires_grad_(False)


def build_backbone(name: str) -> nn.Sequential:
    """torchvision's ResNet up to layer3, whose first block runs at stride 1 (38 x 38, not 19 x 19).

    The parts keep torchvision's names, so its weights load as they are.
    """
    whole = BUILDERS[name](weights=None)
    first = whole.layer3[0]
    # torchvision strides a basic block in its first and a bottleneck in its second convolution.
    strided = first.conv1 if isinstance(first, resnet.BasicBlock) else first.conv2
    strided.stride = (1, 1)
    first.downsample[0].stride = (1, 1)
    parts = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3")
    return nn.Sequential(OrderedDict((part, getattr(whole, part)) for part in parts))
