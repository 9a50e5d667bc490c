"""The ResNets (He et al. 2015): each name below is a value of `--backbone`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ssdctl.download.pinned_files import PinnedFile, torchvision_weights
from ssdctl.model.backbones import RESNET

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone


@dataclass(frozen=True, eq=False)
class ResNet:
    """A member of the family; see `BackboneFile`."""

    depths: tuple[int, int, int, int]  # blocks of each layer
    PARAMETERS: tuple[int, int]
    WEIGHTS: dict[str, PinnedFile] = field(default_factory=dict)
    is_deep: bool = False  # made of bottlenecks
    width: int = 64
    last_channels: int = 256
    CONSTANTS = RESNET
    EXTRA_NORMS = ("none", "batch")

    def build(self) -> Backbone:
        from ssdctl.model.resnet import BasicBlock, Bottleneck, ResNetBackbone

        block = Bottleneck if self.is_deep else BasicBlock
        widths = {"width": self.width, "last_channels": self.last_channels}
        return ResNetBackbone(block, self.depths, **widths)


resnet18 = ResNet(
    (2, 2, 2, 2),
    (6_578_360, 92_190),
    {"imagenet-v1": torchvision_weights("resnet18-f37072fd", "torchvision V1")},
    last_channels=128,
)
resnet34 = ResNet(
    (3, 4, 6, 3),
    (12_131_896, 96_798),
    {
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
    },
)
resnet50 = ResNet(
    (3, 4, 6, 3),
    (12_812_088, 124_446),
    {
        "19c8e357": torchvision_weights("resnet50-19c8e357", "torchvision before 0.9"),
        "imagenet-v1": torchvision_weights(
            "resnet50-0676ba61",
            "torchvision V1; SSD300 of NVIDIA's recipe: AP 0.251",
            "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
            102_530_333,
        ),
        "imagenet-v2": torchvision_weights(
            "resnet50-11ad3fa6", "torchvision V2; nvidia-r50 starts from it: AP 0.268"
        ),
    },
    is_deep=True,
)
resnet101 = ResNet(
    (3, 4, 23, 3),
    (31_804_216, 124_446),
    {
        "imagenet-v1": torchvision_weights("resnet101-63fe2227", "torchvision V1"),
        "imagenet-v2": torchvision_weights("resnet101-cd907fc2", "torchvision V2"),
    },
    is_deep=True,
)
resnet152 = ResNet(
    (3, 8, 36, 3),
    (47_447_864, 124_446),
    {
        "imagenet-v1": torchvision_weights("resnet152-394f9c45", "torchvision V1"),
        "imagenet-v2": torchvision_weights("resnet152-f82ba261", "torchvision V2"),
    },
    is_deep=True,
)
# An eighth of the channels: a step takes a tenth of a second, to try things out.
tiny = ResNet((2, 2, 2, 2), (145_024, 11_550), width=8, last_channels=128)
