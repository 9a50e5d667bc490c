"""One file per backbone; its name is the file's. Other packages add theirs by entry points.

A file, or the module of an entry point in the group `ssdctl.backbones`, has:

    CONSTANTS: ModelConstants
    PARAMETERS: number of parameters of SSD300 with it: shared, and per class with background
    WEIGHTS: pinned files by the end of their name, `imagenet-v1` of `NAME-imagenet-v1`; or empty
    EXTRA_NORMS: the values of `--extra-norm` that it supports, the first the default
    build() -> ssdctl.model.backbone.Backbone

Importing it does not import torch: only `build` does, so that help, plans and downloads stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

from ssdctl.config.fields import BACKBONES
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.runtime.packages import load_plugin

if TYPE_CHECKING:
    from ssdctl.model.backbone import Backbone
    from ssdctl.model.constants import ModelConstants


class BackboneFile(Protocol):
    CONSTANTS: ModelConstants
    PARAMETERS: tuple[int, int]
    WEIGHTS: dict[str, PinnedFile]
    EXTRA_NORMS: tuple[str, ...]

    def build(self) -> Backbone:
        """Return the network with random weights."""


def find_backbone(name: str) -> BackboneFile:
    """Return the module of a backbone, without importing torch.

    Raises:
        UsageError: There is none of that name, or its package cannot be imported.
    """
    return cast(BackboneFile, load_plugin(*BACKBONES, name))
