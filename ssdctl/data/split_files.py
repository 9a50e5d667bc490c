"""The files of a split, and the names of splits."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
SPLITS = ("train", "val", "test")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


class SplitFiles(NamedTuple):
    """The files of one split."""

    images: Path
    annotations: Path


def split_of(name: str) -> str | None:
    """Return the split that a file or folder name contains, as in `instances_Train-2.json`.

    Only whole words count: `trainer` is not a split.
    """
    words = re.split(r"[^a-z]+", name.lower())
    splits = {SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS}
    return splits.pop() if len(splits) == 1 else None


def usable_splits(splits: Mapping[str, list[T]]) -> dict[str, list[T]]:
    """Return the splits that have images; if there is no validation split, test validates."""
    images = dict(splits)
    if images.get("test") and not images.get("val"):
        log.info("no validation images are given: the test images are used to validate")
        images["val"] = images.pop("test")
    return {split: images[split] for split in SPLITS if images.get(split)}
