"""The source of a value: which layer of the config set it."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """The layers of a config; a later one overrides those before it."""

    DEFAULT = 0
    PRESET = 1  # a recipe or a cluster
    RULE = 2  # that adapts a run to its data or its device
    FILE = 3
    ENVIRONMENT = 4
    CALL = 5  # an option, or an argument of the Python API


class Source(NamedTuple):
    kind: Kind
    label: str  # for people: `default`, `preset NAME`, `FILE:LINE`, `SSDCTL_X`, `--option`

    def __str__(self) -> str:
        return self.label


DEFAULT = Source(Kind.DEFAULT, "default")
ASSIGNMENT = Source(Kind.CALL, "--set")


def of_call(label: str) -> Source:
    return Source(Kind.CALL, label)
