"""Classes: names and category ids, those of COCO, and how to match those of two datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ssdctl.runtime.safe_text import listed

MAX_NAMED = 8  # names listed in a message
# Far more than any name of a class; longer ones are refused.
Name = Annotated[str, msgspec.Meta(max_length=10_000)]


class ClassName(msgspec.Struct, frozen=True):
    """A class: COCO's category id and its name. Its label is its position in the list plus one."""

    id: int | None  # None if a third-party checkpoint gives only the name
    name: Name


def match_classes(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> list[int] | None:
    """Return the position in `actual` of each class of `expected`, or None if their names differ.

    Category ids and the order do not matter: a labeling tool may renumber them at each export.
    Classes with equal names are matched in the order in which they come.
    """
    positions: dict[str, list[int]] = {}
    for position, entry in enumerate(actual):
        positions.setdefault(entry.name, []).append(position)
    if Counter(c.name for c in expected) != {name: len(p) for name, p in positions.items()}:
        return None
    return [positions[entry.name].pop(0) for entry in expected]


def class_differences(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> str:
    """Return which names only one of the two has, for messages; empty if there are none."""
    missing, extra = (
        Counter(c.name for c in a) - Counter(c.name for c in b)
        for a, b in ((expected, actual), (actual, expected))
    )
    parts = [("missing", missing), ("not in the checkpoint", extra)]
    return "; ".join(f"{what}: {listed(list(names), MAX_NAMED)}" for what, names in parts if names)


# The 80 classes of COCO 2017 in the order of its files: ids 1 to 90 with gaps.
_COCO_NAMES = (
    "person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire "
    "hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant, "
    "bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, "
    "snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, "
    "tennis racket, bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, "
    "sandwich, orange, broccoli, carrot, hot dog, pizza, donut, cake, chair, couch, potted "
    "plant, bed, dining table, toilet, tv, laptop, mouse, remote, keyboard, cell phone, "
    "microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, "
    "hair drier, toothbrush"
)
_COCO_GAPS = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
_COCO_IDS = (number for number in range(1, 91) if number not in _COCO_GAPS)
COCO_CLASSES = tuple(zip(_COCO_IDS, _COCO_NAMES.split(", "), strict=True))
UNUSED = "(unused)"  # the name of an output for an id that COCO left out
COCO_NUM_CLASSES = len(COCO_CLASSES)
COCO_NUM_IMAGES = 117_266  # training images of COCO 2017 with boxes
