"""One file per backbone, whose name is the file's; the ResNets share one.

Other packages add theirs by entry points. A file, or the module of an entry point in the group
`ssdctl.backbones`, has what `BackboneFile` lists. Importing it does not import torch: only `build`
does, so that plans stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import BACKBONES, Plugin

if TYPE_CHECKING:
    from ssdctl.download.pinned_files import PinnedFile
    from ssdctl.model.backbone import Backbone


class ModelConstants(NamedTuple):
    """Per-architecture constants that are not parameters.

    Input, loss and post-processing read them and have no branches for single networks. The default
    boxes are the same for all (`ssdctl/boxes.py`).
    """

    mean: tuple[float, float, float]  # RGB in 0 to 1
    std: tuple[float, float, float]
    matches_at_threshold: bool  # whether an IoU equal to the threshold makes a box positive
    loss_divisor: Literal["image", "batch"]  # positives of each image, or of the whole batch
    score_threshold: float  # in evaluation, unless the user sets another one
    nms_iou: float
    candidates_per_class: int  # the best before NMS
    clips_boxes: bool  # to the image, before NMS

    def thresholds(self, score: float | None, nms_iou: float | None) -> tuple[float, float]:
        """Return the thresholds of score and NMS; None becomes the network's own."""
        return (
            self.score_threshold if score is None else score,
            self.nms_iou if nms_iou is None else nms_iou,
        )


# The ResNets of MLPerf, Habana, NVIDIA and DALI.
RESNET = ModelConstants(
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    matches_at_threshold=False,
    loss_divisor="image",
    score_threshold=0.05,
    nms_iou=0.5,
    candidates_per_class=200,
    clips_boxes=False,
)


def constants_of_model(model: Any) -> ModelConstants:
    """Return the constants of a network, by default the ResNets'."""
    constants: ModelConstants = getattr(model, "constants", RESNET)
    return constants


class BackboneFile(Protocol):
    """A module of this folder, a ResNet, or a plugin."""

    CONSTANTS: ModelConstants
    PARAMETERS: tuple[int, int]  # of SSD300: shared, and per class with background
    WEIGHTS: dict[str, PinnedFile]  # by key: `imagenet-v1` of `NAME-imagenet-v1`
    EXTRA_NORMS: tuple[str, ...]  # the values of `--extra-norm` that it supports

    def build(self) -> Backbone:
        """Return the network with random weights."""


def find_backbone(name: str) -> BackboneFile:
    """Return the module of a backbone, without importing torch."""
    return load_backbone_file(name)[0]


def load_backbone_file(name: str) -> tuple[BackboneFile, Plugin | None]:
    """Return the module of a backbone, and its plugin unless it is built in; as `find_backbone`."""
    file, plugin = plugins.load(BACKBONES, name)
    if plugin is not None:
        with plugin.errors("checking it"):
            _check(file, plugin)
    return file, plugin


def _check(file: Any, plugin: Plugin) -> None:
    from ssdctl.download.pinned_files import PinnedFile  # late: a step downloads nothing

    constants, parameters, norms, weights = (
        getattr(file, name, None) for name in ("CONSTANTS", "PARAMETERS", "EXTRA_NORMS", "WEIGHTS")
    )
    plugin.require(isinstance(constants, ModelConstants), "CONSTANTS, a ModelConstants")
    are_counts = isinstance(parameters, tuple) and [*map(type, parameters)] == [int, int]
    plugin.require(are_counts, "PARAMETERS, two numbers")
    are_norms = isinstance(norms, tuple) and norms and {*norms} <= {"none", "batch"}
    plugin.require(are_norms, "EXTRA_NORMS, a tuple of none or batch")
    are_files = isinstance(weights, dict) and all(
        isinstance(file, PinnedFile)
        and all(isinstance(text, str) for text in (file.name, file.url, file.sha256))
        and isinstance(file.bytes, int | None)
        for file in weights.values()
    )
    plugin.require(are_files, "WEIGHTS, a dictionary of PinnedFile(name, url, sha256, bytes)")
    plugin.require(callable(getattr(file, "build", None)), "a function build")
