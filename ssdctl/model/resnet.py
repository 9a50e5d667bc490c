"""ResNet (He et al. 2015) for image classification, equal to torchvision's in names and numbers.

The modules have torchvision's names, so its state dicts load as they are, and they draw their
random initial weights in torchvision's order, so a seed gives the same weights. It is defined here
because importing torchvision takes 9 seconds of CPU time in every process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdctl.model import tensor_device

CLASSES = 1000  # of ImageNet


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
    )


class StemConv(nn.Conv2d):
    """The first convolution, of images with three planes."""

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 64, H / 2, W / 2)."""
        if torch.compiler.is_compiling() and tensor_device.is_gpu(images_B3HW):
            return self.with_fourth_plane(images_B3HW)
        return super().forward(images_B3HW)

    def with_fourth_plane(self, images_B3HW: Tensor) -> Tensor:
        """Return the same from four planes, the last of zeros.

        Tensor cores need aligned pixels; the compiler writes the plane with the colors.
        """
        plane = (0, 0, 0, 0, 0, 1)
        return self._conv_forward(F.pad(images_B3HW, plane), F.pad(self.weight, plane), self.bias)


class NormReLU(nn.ReLU):
    """ReLU directly after a batch norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Return max(x, 0), of NaN NaN."""
        if torch.compiler.is_compiling() and tensor_device.is_gpu(x):
            return self.as_comparison(x)
        return super().forward(x)

    def as_comparison(self, x: Tensor) -> Tensor:
        """Return the same; backward compares x again, which the compiler computes from the input of
        the batch norm, so that it need not read the result."""
        return torch.where(x <= 0, x.new_zeros(()), x)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions; the first one strides."""

    expansion = 1

    def __init__(
        self, in_channels: int, width: int, stride: int, downsample: nn.Module | None
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = NormReLU(inplace=True)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, width, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return F.relu(out, inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution; the 3x3 one strides (known as ResNet v1.5)."""

    expansion = 4

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
        self.relu = NormReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, 4 width, H / stride, W / stride)."""
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """The network from (B, 3, H, W) images to (B, 1000) logits.

    Args:
        block: `BasicBlock` or `Bottleneck`.
        depths: Blocks of each of the four layers.
    """

    def __init__(self, block: type[BasicBlock | Bottleneck], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = StemConv(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = NormReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(block, 64, 64, depths[0], stride=1)
        self.layer2 = _layer(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = _layer(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = _layer(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Return the logits of normalized images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images_B3HW))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


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


BUILDERS: dict[str, Callable[[], ResNet]] = {
    "resnet18": lambda: ResNet(BasicBlock, (2, 2, 2, 2)),
    "resnet34": lambda: ResNet(BasicBlock, (3, 4, 6, 3)),
    "resnet50": lambda: ResNet(Bottleneck, (3, 4, 6, 3)),
    "resnet101": lambda: ResNet(Bottleneck, (3, 4, 23, 3)),
    "resnet152": lambda: ResNet(Bottleneck, (3, 8, 36, 3)),
}
