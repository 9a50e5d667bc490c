"""Divide a split in two by file names, and recognize names of frames of one video."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations, nfc, paths_below
from ssdctl.errors import DataError, UsageError
from ssdctl.runtime.safe_text import counted

# Names that differ only in a counter, or are augmented copies of one image by Roboflow.
SERIES = (r"(.*)\.rf\.[0-9a-f]+\.\w+$", r"(.*?)[-_ .]*\d+\.\w+$")
ROBOFLOW = re.compile(r"\.rf\.\w+(?=\.\w+$)")  # another one in every export
MAX_STATES = 500  # that are remembered
MAX_PARTS = 3  # of a path that are compared if the image is not where it was
MIN_SERIES = 3  # fewer cannot be divided well
NOTHING_KNOWN: Mapping[str, bool] = MappingProxyType({})
MIN_SHARE = 0.5  # of the images; fewer are taken for chance


class Division(NamedTuple):
    """How --split divided the images of a dataset; paths are in form NFC."""

    states: tuple[str, ...] = ()  # hashes of all sides, the last one first, since an image moved
    sides: Mapping[str, bool] = NOTHING_KNOWN  # path of each image ever divided: trained on?
    gone: Collection[str] = ()  # paths of those that were renamed, or gone when an image moved
    options: tuple[float, str | None] | None = None  # --split and --group that made the sides


UNDIVIDED = Division()


def divided(
    annotations: Annotations,
    share: float,
    group: str | None = None,
    folder: str = ".",
    last: Division = UNDIVIDED,
) -> tuple[Annotations, Annotations]:
    """Divide a split: `share` of the images to train on, the others to validate.

    Images that were divided before stay where they are, see `sides_of`. Of the others, only the
    path below the dataset folder decides: the first time, the same files are divided the same way
    everywhere. Paths with the same match of the regular expression `group` (or of its first group
    that matches) stay together, and the share is approximate.

    Args:
        folder: The folder of the file names, relative to the dataset folder.
        last: How the images were divided before with the same share and group.
    """
    names = paths_below(folder, annotations.file_names)
    if len({*names}) < 2:
        images = counted(len(names), "image")
        raise DataError(f"{annotations.origin}: {images} cannot be divided by --split")
    groups = names if group is None else _groups(names, group)
    counts = Counter(groups)
    if len(counts) < 2:
        raise UsageError(
            f"--group {group}: all {len(names):,} images are in the group {groups[0]!r}",
            hint="give an expression that matches another part of the names",
        )
    sides: dict[str, bool] = {}
    before = {**last.sides, **sides_of(names, last)[0]}
    for name, path in zip(groups, names, strict=True):
        if path in before:
            sides[name] = sides.get(name, True) and before[path]
    new = _shuffled(name for name in counts if name not in sides)
    chosen = {name for name, is_train in sides.items() if is_train}
    fewest, most = int(not chosen), len(new) - (len(chosen) == len(sides))
    if fewest > most:  # one part has no image any more
        return divided(annotations, share, group, folder)
    sums = np.cumsum([sum(counts[name] for name in chosen), *(counts[name] for name in new)])
    off = np.abs(sums - round(share * len(names)))[fewest : most + 1]
    chosen.update(new[: fewest + int(off.argmin())])
    is_train = np.array([name in chosen for name in groups])
    return annotations.with_images(is_train), annotations.with_images(~is_train)._replace(notes=())


def sides_of(paths: Collection[str], last: Division) -> tuple[dict[str, bool], set[str]]:
    """Return whether images were trained on before, and the images that may be under a new name.

    New images have the side of those that are not where they were and whose paths end in the same
    folders and file name, if these are all on one side and not fewer. The hash in Roboflow's file
    names is ignored.
    """
    known = last.sides.keys() - last.gone
    sides = {path: last.sides[path] for path in paths if path in known}
    lost = known.difference(sides)
    for num_parts in range(MAX_PARTS, 0, -1) if lost else ():
        new = _by_end((path for path in paths if path not in sides), num_parts)
        for end, before in _by_end(lost, num_parts).items():
            after = new.get(end, [])
            was = {last.sides[path] for path in before + after if path in last.sides}
            if len(was) == 1 and 0 < len(after) <= len(before):
                sides |= dict.fromkeys(after, was.pop())
                lost.difference_update(sorted(before)[: len(after)])
    return sides, lost


def _by_end(paths: Iterable[str], num_parts: int) -> dict[str, list[str]]:
    ends: dict[str, list[str]] = {}
    for path in paths:
        end = ROBOFLOW.sub("", "/".join(path.split("/")[-num_parts:]))
        ends.setdefault(end, []).append(path)
    return ends


def next_division(last: Division, now: Mapping[str, bool]) -> tuple[Division, int]:
    """Return a division after the last one, and how many images moved, or may have.

    A new image may have moved if one that is gone since an image moved was on the other side. The
    training images of each state are not validated on in later ones.

    Args:
        now: Whether an image, by its path, is one to train on.
    """
    before, lost = sides_of(now, last)
    new = Counter(now[path] for path in now.keys() - before.keys())
    old = Counter(last.sides[path] for path in lost)
    sides = {**last.sides, **before}
    num_moved = sum(sides.get(path, is_train) != is_train for path, is_train in now.items())
    num_moved += min(old[True], new[False]) + min(old[False], new[True])
    text = "\0".join(f"{path} {is_train}" for path, is_train in sorted(now.items()))
    states = [hashlib.sha256(os.fsencode(text)).hexdigest()[:12]]
    if num_moved or not last.states:
        lost = set()
    else:
        states += [state for state in last.states if state not in states]
    sides |= now
    gone = sides.keys() - now.keys() - lost
    return last._replace(states=tuple(states[:MAX_STATES]), sides=sides, gone=gone), num_moved


def is_held_out(names: Sequence[str], fold: str, group: str | None) -> NDArray[np.bool_]:
    """Return which images, by path, are in the fold `I/K`; each image is in one of the K.

    Raises:
        UsageError: There are fewer groups than folds; or see `divided`.
    """
    number, count = map(int, fold.split("/"))
    groups = list(names) if group is None else _groups(names, group)
    sizes = Counter(groups)
    if len(sizes) < count:
        what = counted(len(sizes), "image" if group is None else "group")
        what += "" if group is None else f" by --group {group}"
        raise UsageError(f"--fold {fold}: {what} cannot be divided in {count}")
    order = _shuffled(sizes)
    middles = np.cumsum([sizes[name] for name in order]) - [sizes[name] / 2 for name in order]
    parts = dict(zip(order, (middles * count / len(groups)).astype(int).tolist(), strict=True))
    if len({*parts.values()}) < count:  # a group is larger than a fold
        filled = [0] * count
        for name in sorted(order, key=lambda name: -sizes[name]):
            parts[name] = filled.index(min(filled))
            filled[parts[name]] += sizes[name]
    return np.array([parts[name] == number - 1 for name in groups], np.bool_)


def _shuffled(names: Iterable[str]) -> list[str]:
    """Return names in an order that only they decide."""
    return sorted(names, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())


def _groups(names: Sequence[str], group: str) -> list[str]:
    """Return the group of each name; a name that does not match is its own."""
    try:
        matches = [re.search(nfc(group), name) for name in names]
    except re.error as error:
        raise UsageError(f"--group {group}: not a regular expression: {error}") from None
    if not any(matches):
        raise UsageError(f"--group {group}: matches no file name, such as {names[0]}")
    return [
        n if m is None else next((part for part in m.groups() if part is not None), m[0])
        for n, m in zip(names, matches, strict=True)
    ]


def series_warning(train: Sequence[str], val: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Return a warning if names look as if frames of one video were in both splits."""
    words = {_letters(name) for name in classes}
    for pattern in SERIES:
        first, second = _first_names(pattern, train), _first_names(pattern, val)
        matches = (re.search(pattern, name) for name in (*train, *val))
        every = Counter(match[1] for match in matches if match)
        counts = Counter({name: count for name, count in every.items() if count > 1})
        num_classes = sum(_letters(name) in words for name in counts)  # cat_001.jpg is no video
        both = sorted(first.keys() & second.keys())
        is_rare = counts.total() < MIN_SHARE * (len(train) + len(val))
        if both and len(counts) >= MIN_SERIES and not is_rare and 2 * num_classes < len(counts):
            return [
                f"{len(both):,} of {len(counts):,} series of names are in both splits, such as "
                f"{first[both[0]]} (train) and {second[both[0]]} (val). If a series is a video, or "
                f"copies of one image, keep it in one split: --group {shlex.quote(pattern)}"
            ]
    return []


def _first_names(pattern: str, names: Sequence[str]) -> dict[str, str]:
    """Return the first name of each series."""
    matches = ((re.search(pattern, name), name) for name in reversed(names))
    return {match[1]: name for match, name in matches if match}


def _letters(text: str) -> str:
    return re.sub(r"[\W\d_]+", "", text.rstrip("/").rpartition("/")[2]).lower()
