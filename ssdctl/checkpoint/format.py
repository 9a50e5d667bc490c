"""What a checkpoint contains: its keys, their types and bounds, and the format's number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ssdctl.config.fields import LARGEST_INT
from ssdctl.data.classes import ClassName

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
