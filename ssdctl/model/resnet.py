"""ResNet (He et al. 2015), equal to torchvision's in names and numbers.

The modules have torchvision's names, so its state dicts load as they are, and they draw their
random initial weights in torchvision's order, so a seed gives the same weights. It is defined here
because importing torchvision takes 9 seconds of CPU time in every process.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ssdctl.model.backbone import EXTRA_WIDTHS, Backbone

CLASSES = 1000  # ImageNet's


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the first one strides."""

    expansion = 1
    strided = 1  # conv1 strides

    def __init__(
        self, in_channels: int, width: int, stride: int, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution; the 3x3 one strides (known as ResNet v1.5)."""

    expansion = 4
    strided = 2  # conv2 strides

    def __init__(
        self, in_channels: int, width: int, stride: int, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return F.relu(out, inplace=True)


class ResNetBackbone(Backbone):
    """A ResNet up to layer3, with stride 1 in layer3 (38 x 38 cells instead of 19 x 19).

    Args:
        width: Channels of the stem, 64; all others are proportional to it.
        last_channels: Channels of the last feature map, with a stem of 64.
    """

    stages = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",))

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, ...],
        *,
        width: int = 64,
        last_channels: int = 256,
    ) -> None:
        super().__init__(_layers(block, depths, width))
        first: Any = self.get_submodule("layer3.0")
        strided = getattr(first, f"conv{block.strided}")
        strided.stride = first.downsample[0].stride = (1, 1)
        others = [c * width // 64 for c in (512, 512, 256, 256, last_channels)]
        self.channels = (4 * width * block.expansion, *others)
        self.extra_widths = tuple(c * width // 64 for c in EXTRA_WIDTHS)
        # Up to the first 3x3 convolution of layer1, as in Habana-TF.
        numbers = range(1, block.strided + 1)
        inner = [f"layer1.0.{part}{n}" for n in numbers for part in ("conv", "bn")]
        self.stem = ("conv1", "bn1", *inner)

    def pretrained_parts(
        self, state: Mapping[str, Tensor], extra: nn.ModuleList
    ) -> list[tuple[nn.Module, dict[str, Tensor]]]:
        """Return torchvision's weights without the layers behind layer3."""
        unused = ("layer4.", "fc.")
        return [(self, {k: v for k, v in state.items() if not k.startswith(unused)})]


def _layers(
    block: type[BasicBlock | Bottleneck], depths: tuple[int, ...], width: int
) -> OrderedDict[str, nn.Module]:
    """Return the layers up to layer3; the others are built only to draw random numbers."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        bn1=nn.BatchNorm2d(width),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    in_channels = width
    for number, depth in enumerate(depths, 1):
        inner, stride = width * 2 ** (number - 1), 1 if number == 1 else 2
        layers[f"layer{number}"] = _layer(block, in_channels, inner, depth, stride)
        in_channels = inner * block.expansion
    nn.Linear(in_channels, CLASSES)
    for module in nn.Sequential(layers).modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    del layers["layer4"]
    return layers


def _layer(
    block: type[BasicBlock | Bottleneck], in_channels: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    """Return `depth` blocks; the first one strides and changes the number of channels."""
    out_channels = width * block.expansion
    downsample = None
    if stride != 1 or in_channels != out_channels:
        downsample = nn.Sequential(
            _conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
        )
    first = block(in_channels, width, stride, downsample)
    return nn.Sequential(first, *(block(out_channels, width, 1, None) for _ in range(depth - 1)))
