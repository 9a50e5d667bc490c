"""VGG16 as the SSD paper changes it (Liu et al. 2016, section 3.1), with torchvision's layer order.

The trunk ends at conv4_3 (512 x 38 x 38). pool5 keeps the resolution, and fc6 and fc7 are
convolutions, the first of them dilated. Weights of torchvision's `ssd300_vgg16` load by a renaming.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions
CHANNELS = (512, 1024, 512, 256, 256, 256)  # of the six feature maps
TRUNK_LAYERS = 23  # conv1_1 to the ReLU behind conv4_3
CONV5_LAYERS = 7  # pool4 to the ReLU behind conv5_3
FROZEN_LAYERS = 5  # conv1_1 to pool1
FIRST_MAP_SCALE = 20.0  # of the L2-normalised conv4_3, learned from there


class L2Norm(nn.Module):
    """Scale each position of a (B, C, H, W) map to length 1 over C, times a learned factor."""

    def __init__(self, channels: int, scale: float = FIRST_MAP_SCALE) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), scale))

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Normalise in fp32 or better, whatever the map's dtype."""
        exact = features_BCHW.to(torch.promote_types(features_BCHW.dtype, torch.float32))
        unit = F.normalize(exact, dim=1).to(features_BCHW.dtype)
        return self.scale.to(unit.dtype).view(1, -1, 1, 1) * unit


def build_trunk() -> nn.Sequential:
    """Return conv1_1 to conv4_3 with their ReLUs: (B, 3, 300, 300) -> (B, 512, 38, 38).

    Layers have the numbers that torchvision's `vgg16().features` gives them.
    """
    return _features()[:TRUNK_LAYERS]


def build_extra() -> list[nn.Sequential]:
    """Return the five blocks behind the trunk: 19 x 19, 10, 5, 3 and 1 cells."""
    fully_connected = nn.Sequential(
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
        nn.ReLU(inplace=True),
        nn.Conv2d(1024, 1024, 1),
        nn.ReLU(inplace=True),
    )
    first = nn.Sequential(*_features()[TRUNK_LAYERS:30], fully_connected)
    return [
        first,
        _block(1024, 256, 512, strided=True),
        _block(512, 128, 256, strided=True),
        _block(256, 128, 256, strided=False),
        _block(256, 128, 256, strided=False),
    ]


def split_imagenet_state(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the trunk and of conv5 from torchvision's `vgg16` state dict.

    The classifier is left out; fc6 and fc7 of the detector start from random weights.
    """
    layers = {
        name.removeprefix("features."): tensor
        for name, tensor in state.items()
        if not name.startswith("classifier.")
    }
    trunk, conv5 = {}, {}
    for name, tensor in layers.items():
        number, _, rest = name.partition(".")
        if number.isdecimal() and int(number) >= TRUNK_LAYERS:
            conv5[f"{int(number) - TRUNK_LAYERS}.{rest}"] = tensor
        else:
            trunk[name] = tensor  # an unknown name is refused by the trunk
    return trunk, conv5


def freeze_first_stage(trunk: nn.Sequential) -> None:
    """Stop training conv1_1 and conv1_2, as torchvision's reference recipe does."""
    trunk[:FROZEN_LAYERS].requires_grad_(False)


def _features() -> nn.Sequential:
    """Return the convolutions of VGG16, conv1_1 to pool5, numbered as torchvision numbers them."""
    layers: list[nn.Module] = []
    in_channels = 3
    for stage, (channels, count) in enumerate(STAGES):
        for _ in range(count):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
            in_channels = channels
        layers.append(nn.MaxPool2d(2, stride=2, ceil_mode=stage == 2))  # 75 -> 38, not 37
    return nn.Sequential(*layers)


def _block(in_channels: int, width: int, out_channels: int, *, strided: bool) -> nn.Sequential:
    stride, padding = (2, 1) if strided else (1, 0)
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, out_channels, 3, stride, padding),
        nn.ReLU(inplace=True),
    )
