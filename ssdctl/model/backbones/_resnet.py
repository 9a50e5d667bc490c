"""Build a ResNet; torch is imported only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone


def build_resnet(depths: tuple[int, ...], *, bottleneck: bool = False, **widths: int) -> Backbone:
    """Return a `ResNetBackbone` of these numbers of blocks; `widths` are its other arguments."""
    from ssdctl.model.resnet import BasicBlock, Bottleneck, ResNetBackbone

    return ResNetBackbone(Bottleneck if bottleneck else BasicBlock, depths, **widths)
