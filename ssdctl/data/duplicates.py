"""Find images that two splits have in common: AP on them says nothing about new images."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import MAX_NAMED
from ssdctl.data.check import Objects
from ssdctl.data.image_files import FingerprintColumns, in_threads
from ssdctl.runtime.safe_text import counted, listed

PART_BYTES = 1 << 20
NEAR = 0.05  # of the image's width or height


class Duplicates(msgspec.Struct, frozen=True):
    """Images of a split whose content another split has, too."""

    split: str  # the other one
    images: int  # of this split
    examples: list[tuple[str, str]]  # the first few: the file here, and the other split's


class ImageVersions(NamedTuple):
    """The N image files of a split, as they were when checked."""

    folder: Path
    names: list[str]
    fingerprints: FingerprintColumns

    def keys(self) -> NDArray[np.int64]:
        """Return size and checksum of each file, (N,)."""
        return self.fingerprints.of_contents()

    def only(self, rows: NDArray[np.bool_]) -> ImageVersions:
        columns = FingerprintColumns._make(column[rows] for column in self.fingerprints)
        return ImageVersions(self.folder, list(itertools.compress(self.names, rows)), columns)


def find_duplicates(images: ImageVersions, others: Mapping[str, ImageVersions]) -> list[Duplicates]:
    """Return which images of a split each of the other splits has, too.

    Files of equal size and checksum are compared as a whole if they still exist.
    """
    found = ((split, _pairs(images, other)) for split, other in others.items())
    return [Duplicates(split, len(pairs), pairs[:MAX_NAMED]) for split, pairs in found if pairs]


def contradictions(
    images: ImageVersions, objects: Objects, is_trained: NDArray[np.bool_]
) -> list[str]:
    """Return a warning if images of a split have the content of another one, but other boxes."""

    def boxes_of(row: int) -> list[tuple[int, list[float]]]:
        own = slice(*objects.starts[row : row + 2])
        return sorted(zip(objects.labels[own].tolist(), objects.boxes[own].tolist(), strict=True))

    keys, names = images.keys(), images.names
    _, groups, counts = np.unique(keys, return_inverse=True, return_counts=True)
    first: dict[int, int] = {}
    pairs: list[str] = []
    for row in np.flatnonzero(is_trained & (counts[groups] > 1)).tolist():
        other = first.setdefault(int(keys[row]), row)
        files = (images.folder / names[n] for n in (row, other))
        if other != row and boxes_of(row) != boxes_of(other) and _same_content(*files):
            pairs.append(f"{names[row]} ({names[other]})")
    what = f"{counted(len(pairs), 'image')} with the content of another one, but other boxes"
    return [f"{what}: {listed(pairs, MAX_NAMED)}"] * bool(pairs)


def copies(
    images: ImageVersions,
    sizes: NDArray[np.int64],
    objects: Objects,
    is_trained: NDArray[np.bool_],
) -> list[str]:
    """Return a warning if images of a split are others drawn on, or encoded again.

    They have the base name, the size and nearly the boxes of another image, and other content.
    `sizes` is N x 2.
    """
    base_names = [name.rpartition("/")[2] for name in images.names]
    if len({*base_names}) == len(base_names):
        return []
    keys, first = images.keys(), dict[tuple[object, ...], int]()
    pairs: list[str] = []
    for row in np.flatnonzero(is_trained).tolist():
        other = first.setdefault((base_names[row], *sizes[row].tolist()), row)
        own, others = (slice(*objects.starts[n : n + 2]) for n in (row, other))
        is_same = keys[row] != keys[other]
        is_same = is_same and np.array_equal(objects.labels[own], objects.labels[others])
        fractions = objects.fractions
        if is_same and np.allclose(fractions[own], fractions[others], rtol=0, atol=NEAR):
            pairs.append(f"{images.names[row]} ({images.names[other]})")
    what = f"{counted(len(pairs), 'image')} with the name, size and boxes of another one, such as"
    return [f"{what} copies with drawn boxes: {listed(pairs, MAX_NAMED)}"] * bool(pairs)


def _pairs(images: ImageVersions, other: ImageVersions) -> list[tuple[str, str]]:
    """Return the files of a split that another split has, with the first such file there."""
    keys, other_keys = images.keys(), other.keys()
    candidates: dict[int, list[str]] = {}
    for row in np.flatnonzero(np.isin(other_keys, keys)):
        candidates.setdefault(int(other_keys[row]), []).append(other.names[row])

    def duplicate_of(row: int) -> str | None:
        path, names = images.folder / images.names[row], candidates[int(keys[row])]
        return next((name for name in names if _same_content(path, other.folder / name)), None)

    rows = np.flatnonzero(np.isin(keys, other_keys)).tolist()
    same = zip(rows, in_threads(duplicate_of, rows), strict=True)
    return [(images.names[row], name) for row, name in same if name is not None]


def _same_content(first: Path, second: Path) -> bool:
    try:
        if first == second or first.samefile(second):
            return True
        digests = []
        for path in (first, second):
            digest = hashlib.blake2b()
            with path.open("rb") as file:
                while part := file.read(PART_BYTES):
                    digest.update(part)
            digests.append(digest.digest())
    except OSError:  # a packed store needs no image files
        return True
    return digests[0] == digests[1]


def duplicate_warnings(
    split: str, images: int, duplicates: Sequence[Duplicates], how: str = "are also"
) -> list[str]:
    """Return what to tell the user about a split of `images` images."""
    warnings = []
    for found in duplicates:
        pairs = [here if here == there else f"{here} ({there})" for here, there in found.examples]
        warning = f"{found.images:,} of {images:,} images of {split} {how} in {found.split}"
        if found.split == "train":
            warning += ", so AP is measured on images that were trained on"
        more = found.images - len(pairs)
        warnings.append(f"{warning}: {', '.join(pairs)}{f' and {more:,} more' * bool(more)}")
    return warnings
