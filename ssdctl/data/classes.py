"""Classes: names and category ids, those of COCO, and how to match those of two datasets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from ssdctl.runtime.printable import listed

MAX_NAMED = 8  # names listed in a message
# Far more than any name of a class; longer ones are refused.
Name = Annotated[str, msgspec.Meta(max_length=10_000)]


class ClassName(msgspec.Struct, frozen=True):
    """A class: COCO's category id and its name. Its label is its place in the list plus one."""

    id: int | None  # None if a third-party checkpoint gives only the name
    name: Name


def match_classes(expected: Sequence[ClassName], actual: Sequence[ClassName]) -> list[int] | None:
    """Return the position in `actual` of each class of `expected`, or None if their names differ.

    Category ids and the order do not matter: a labeling tool may renumber them at each export.
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


# The 80 classes of COCO 2017 in the order of its files: ids 1 to 90 with gaps.
COCO_CLASSES: tuple[tuple[int, str], ...] = (
    (1, "person"),
    (2, "bicycle"),
    (3, "car"),
    (4, "motorcycle"),
    (5, "airplane"),
    (6, "bus"),
    (7, "train"),
    (8, "truck"),
    (9, "boat"),
    (10, "traffic light"),
    (11, "fire hydrant"),
    (13, "stop sign"),
    (14, "parking meter"),
    (15, "bench"),
    (16, "bird"),
    (17, "cat"),
    (18, "dog"),
    (19, "horse"),
    (20, "sheep"),
    (21, "cow"),
    (22, "elephant"),
    (23, "bear"),
    (24, "zebra"),
    (25, "giraffe"),
    (27, "backpack"),
    (28, "umbrella"),
    (31, "handbag"),
    (32, "tie"),
    (33, "suitcase"),
    (34, "frisbee"),
    (35, "skis"),
    (36, "snowboard"),
    (37, "sports ball"),
    (38, "kite"),
    (39, "baseball bat"),
    (40, "baseball glove"),
    (41, "skateboard"),
    (42, "surfboard"),
    (43, "tennis racket"),
    (44, "bottle"),
    (46, "wine glass"),
    (47, "cup"),
    (48, "fork"),
    (49, "knife"),
    (50, "spoon"),
    (51, "bowl"),
    (52, "banana"),
    (53, "apple"),
    (54, "sandwich"),
    (55, "orange"),
    (56, "broccoli"),
    (57, "carrot"),
    (58, "hot dog"),
    (59, "pizza"),
    (60, "donut"),
    (61, "cake"),
    (62, "chair"),
    (63, "couch"),
    (64, "potted plant"),
    (65, "bed"),
    (67, "dining table"),
    (70, "toilet"),
    (72, "tv"),
    (73, "laptop"),
    (74, "mouse"),
    (75, "remote"),
    (76, "keyboard"),
    (77, "cell phone"),
    (78, "microwave"),
    (79, "oven"),
    (80, "toaster"),
    (81, "sink"),
    (82, "refrigerator"),
    (84, "book"),
    (85, "clock"),
    (86, "vase"),
    (87, "scissors"),
    (88, "teddy bear"),
    (89, "hair drier"),
    (90, "toothbrush"),
)
UNUSED = "(unused)"  # the name of an output for an id that COCO left out
