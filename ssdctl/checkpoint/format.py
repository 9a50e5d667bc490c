"""What a checkpoint contains: its keys, their types and bounds, and the format's number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from ssdctl.config.fields import LARGEST_INT
from ssdctl.data.classes import ClassName
from ssdctl.model.ssd300 import Architecture

FORMAT = 1
MAX_CLASSES = 100_000
MAX_COUNT = 2**53  # exact as a float

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Integer = Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Setting = Annotated[int, msgspec.Meta(ge=-LARGEST_INT, le=LARGEST_INT)]
Scalar = bool | Setting | float | str | None


class ArchitectureFields(msgspec.Struct, forbid_unknown_fields=True):
    backbone: str
    extra_norm: Literal["none", "batch"]
    num_classes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CLASSES)]


class ParameterGroup(msgspec.Struct):
    params: list[Count]


class OptimizerFields(msgspec.Struct):
    state: dict[Count, dict[str, Any]]
    param_groups: list[ParameterGroup]


class Payload(msgspec.Struct):
    """The contents of a checkpoint other than its weights, by type."""

    architecture: ArchitectureFields
    classes: list[ClassName]
    config: dict[str, Scalar | list[Scalar]]
    step: Count
    samples_seen: Count
    images: AtLeastOne
    global_batch: AtLeastOne
    best_ap: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None
    optimizer: OptimizerFields


def payload(
    *,
    model: nn.Module,
    averaged: Mapping[str, torch.Tensor] | None,
    architecture: Architecture,
    classes: list[ClassName],
    config: dict[str, Any],
    step: int,
    samples_seen: int,
    images: int,
    global_batch: int,
    best_ap: float | None,
    optimizer: torch.optim.Optimizer,
    rank_statistics: list[list[torch.Tensor]] | None = None,
) -> dict[str, Any]:
    """Return the contents of a checkpoint. Its tensors are the run's: copy them before a step."""
    trained = model.state_dict()
    return {
        "format": FORMAT,
        "model": trained if averaged is None else dict(averaged),  # to evaluate and deploy
        "trained": None if averaged is None else trained,  # to resume from, if it differs
        "architecture": architecture._asdict(),  # the network to build before loading the weights
        "classes": msgspec.to_builtins(classes),  # label = index + 1; ids are COCO's
        "config": config,  # every setting, resolved
        "step": step,  # optimizer steps done
        "samples_seen": samples_seen,  # position in the stream of samples
        "images": images,  # images per epoch
        "global_batch": global_batch,  # samples per step
        "best_ap": best_ap,  # so far
        "optimizer": optimizer.state_dict(),  # momentum and the like
        # Batch norm's statistics of each rank, where `model` has their average, to resume from.
        "rank_statistics": rank_statistics,
    }
