"""Match the classes of a checkpoint and of a dataset, or of two datasets, by name. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssdctl.data.formats.coco import ClassName
from ssdctl.runtime.printable import listed

MAX_NAMED = 8  # names listed in a message


def match_classes(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> list[int] | None:
    """Return the position in `actual` of each class of `expected`, or None if their names differ.

    Category ids and the order do not matter: a labelling tool may renumber them at each export.
    Classes with equal names are matched in the order in which they come.
    """
    places: dict[str, list[int]] = {}
    for place, entry in enumerate(actual):
        places.setdefault(entry.name, []).append(place)
    if Counter(c.name for c in expected) != {name: len(p) for name, p in places.items()}:
        return None
    return [places[entry.name].pop(0) for entry in expected]


def class_differences(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> str:
    """Return which names only one of the two has, for messages; empty if there are none."""
    missing, extra = (
        Counter(c.name for c in a) - Counter(c.name for c in b)
        for a, b in ((expected, actual), (actual, expected))
    )
    parts = [("missing", missing), ("not in the checkpoint", extra)]
    return "; ".join(f"{what}: {listed(list(names), MAX_NAMED)}" for what, names in parts if names)
