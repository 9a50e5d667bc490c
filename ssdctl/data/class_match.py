"""Match the classes of a checkpoint and of a dataset, or of two datasets, by name. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssdctl.data.formats.coco import ClassName

MAX_NAMED = 8  # names listed in a message


def match_classes(known: Sequence[ClassName], listed: Sequence[ClassName]) -> list[int] | None:
    """Return the position in `listed` of each class of `known`, or None if their names differ.

    Category ids and the order do not matter: a labelling tool may renumber them at each export.
    Classes with equal names are matched in the order in which they come.
    """
    places: dict[str, list[int]] = {}
    for place, entry in enumerate(listed):
        places.setdefault(entry.name, []).append(place)
    if Counter(c.name for c in known) != {name: len(p) for name, p in places.items()}:
        return None
    return [places[entry.name].pop(0) for entry in known]


def class_differences(known: Sequence[ClassName], listed: Sequence[ClassName]) -> str:
    """Return which names only one of the two has, for messages; empty if there are none."""
    ours, theirs = Counter(c.name for c in known), Counter(c.name for c in listed)
    parts = [("missing", ours - theirs), ("not in the checkpoint", theirs - ours)]
    return "; ".join(f"{what}: {_named(list(names))}" for what, names in parts if names)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
