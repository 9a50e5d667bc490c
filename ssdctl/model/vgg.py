"""VGG16 as the SSD paper changes it (Liu et al. 2016, section 3.1), with torchvision's layer order.

The backbone ends at conv4_3 (512 x 38 x 38). pool5 keeps the resolution, and fc6 and fc7 are
convolutions, the first of them dilated. Weights of torchvision's `ssd300_vgg16` load
after renaming their keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssdctl.model.backbone import Backbone

BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions
CONV4_3, CONV5_3 = 23, 30  # number of layers from conv1_1 to the ReLU after it
STAGE_STARTS = (0, 5, 10, 17)  # first layers of four stages; a pool belongs to the stage before
FIRST_MAP_SCALE = 20.0  # initial factor for the L2-normalized conv4_3


class L2Norm(nn.Module):
    """Scale each position of a (B, C, H, W) map to length 1 over C, times a learned factor."""

    def __init__(self, channels: int, scale: float = FIRST_MAP_SCALE) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((channels,), scale))

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Normalize in fp32 or better, whatever the map's dtype."""
        exact = features_BCHW.to(torch.promote_types(features_BCHW.dtype, torch.float32))
        unit = F.normalize(exact, dim=1).to(features_BCHW.dtype)
        return self.scale.to(unit.dtype).view(1, -1, 1, 1) * unit


class VGG16(Backbone):
    """conv1_1 to conv4_3 with their ReLUs, numbered as in torchvision's `vgg16().features`."""

    channels = (512, 1024, 512, 256, 256, 256)
    stages = tuple(
        tuple(map(str, range(first, end)))
        for first, end in itertools.pairwise((*STAGE_STARTS, CONV4_3))
    )
    stem = stages[0]  # as in torchvision's reference recipe

    def __init__(self) -> None:
        super().__init__(*_features()[:CONV4_3])

    def first_map_norm(self) -> nn.Module:
        return L2Norm(self.channels[0])

    def extra_blocks(self, norm: str) -> list[nn.Sequential]:
        """Return five blocks without batch norm, whatever `norm` is."""
        fully_connected = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1),
            nn.Conv2d(512, 1024, 3, padding=6, dilation=6),
            nn.ReLU(inplace=True),
            nn.Conv2d(1024, 1024, 1),
            nn.ReLU(inplace=True),
        )
        return [
            nn.Sequential(*_features()[CONV4_3:CONV5_3], fully_connected),
            *(self.extra_block(number, "none") for number in range(1, 5)),
        ]

    def pretrained_parts(
        self, state: Mapping[str, Tensor], extra: nn.ModuleList
    ) -> list[tuple[nn.Module, dict[str, Tensor]]]:
        """Return conv1 to conv4 and conv5; fc6 and fc7 start from random weights."""
        trunk, conv5 = {}, {}
        for name, tensor in state.items():
            if name.startswith("classifier."):
                continue
            name = name.removeprefix("features.")
            number, _, rest = name.partition(".")
            if number.isdecimal() and int(number) >= CONV4_3:
                conv5[f"{int(number) - CONV4_3}.{rest}"] = tensor
            else:
                trunk[name] = tensor  # an unknown name is refused by the caller
        first = extra[0]
        assert isinstance(first, nn.Sequential)
        return [(self, trunk), (first[: CONV5_3 - CONV4_3], conv5)]


def _features() -> nn.Sequential:
    """Return the layers of VGG16, conv1_1 to pool5, numbered as torchvision numbers them."""
    layers: list[nn.Module] = []
    in_channels = 3
    for stage, (channels, count) in enumerate(BLOCKS):
        for _ in range(count):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU(inplace=True)]
            in_channels = channels
        layers.append(nn.MaxPool2d(2, stride=2, ceil_mode=stage == 2))  # 75 -> 38, not 37
    return nn.Sequential(*layers)
