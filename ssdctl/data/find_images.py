"""Find the image file that labels mean: one function for all formats.

    ImageFinder(root).find([Wanted("a.jpg", labels="annotations", split="val")], root / "val.csv")

Labels name an image by a path, with folders of another machine or without any, or only by its stem.
Evidence counts in this order:

1. an exact path: the name below the folder of the labels, of the split, of the dataset, or of the
   format's standard folders such as `JPEGImages` and `images`;
2. the longest end of the path that agrees, among files that no exact path names;
3. among files that agree equally: the folder that mirrors the labels' folder, the declared size.

A file in the folder of another split does not count. A file serves one entry: the boxes of a
missing image never go to another listed image. Files that remain ambiguous are an error.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np

from ssdctl.data.annotations import (
    MAX_NAMED,
    Annotations,
    LabeledImage,
    one_image_per_file,
    refuse,
    split_of,
)
from ssdctl.data.image_files import (
    ANNOTATION_FOLDERS,
    file_sizes,
    files_below,
    in_threads,
    is_image_name,
    size_or_none,
)
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

STANDARD = ("", "images", "JPEGImages", "img", "data")  # "": the dataset folder
TOOL_FOLDERS = {"upload", "uploads", "label-studio", "local-files"}
SAMPLE_NAMES = 20  # file names by which a folder of images is tried
WHICH = "choose their folder with --image-dir DIR, or write paths below the dataset into the labels"
Resolved = tuple[Annotations, list[int | None]]  # and the size of each file in bytes
_Rank = Callable[["_Option"], tuple[int, ...]]


class Wanted(NamedTuple):
    """An image as its labels name it."""

    name: str  # path, base name or stem
    labels: str = ""  # folder of the labels, relative to the dataset folder
    split: str | None = None  # files in folders of other splits do not count; None: all count
    size: tuple[int, int] = (0, 0)  # declared width and height in pixels; 0: not given
    any_suffix: bool = False  # whether a file with another suffix will do
    folder: str = ""  # named by the labels as the folder of the image


class Found(NamedTuple):
    file: str  # relative to the dataset folder
    is_exact: bool


class _Option(NamedTuple):
    """A file that may be the wanted image, and the evidence for it."""

    file: str
    prefix: str | None  # the folder to which the name is an exact path
    tail: int  # number of names at the end of the path that agree
    is_in_split: bool  # whether its folder has the name of the wanted split
    standard: int  # position of its folder in the order of the standard ones
    num_shared: int  # number of folders that it shares with the labels


class ImageFinder:
    """The image files below a folder.

    `image_dir` is the only folder in which they are searched for, if the user names one. `files`
    are relative paths; all files below `root` by default.
    """

    def __init__(
        self,
        root: Path,
        standard: Sequence[str] = STANDARD,
        image_dir: str | None = None,
        *,
        files: Iterable[str] | None = None,
    ) -> None:
        self.root, self.standard = root, [name.lower() for name in standard]
        self.image_dir = parts_of(image_dir or "")
        found = files_below(root) if files is None else files
        paths = ((file, file.split("/")) for file in found)
        self.files = {
            file: parts
            for file, parts in paths
            if is_image_name(parts[-1]) and parts[: len(self.image_dir)] == self.image_dir
        }
        if image_dir and not self.files:
            raise DataError(f"--image-dir {image_dir}: no images below {root / image_dir}")
        self.by_name: dict[str, list[str]] = {}
        self.by_stem: dict[str, list[str]] = {}
        for file, parts in self.files.items():
            self.by_name.setdefault(parts[-1], []).append(file)
            self.by_stem.setdefault(parts[-1].rpartition(".")[0], []).append(file)

    def find(
        self,
        wanted: Sequence[Wanted],
        labels: Path,
        claimed: Collection[str] = (),
        *,
        may_share: bool = False,
    ) -> list[Found | None]:
        """Return the file of each image, None if it is missing.

        Entries with the same exact path get the same file, others only if they `may_share` it. No
        entry gets a `claimed` file unless by an exact path.

        Raises:
            DataError: An image fits several files; the message begins with `labels`.
        """
        names = [self._name(entry.name) for entry in wanted]
        options = [self._options(w, name) for w, name in zip(wanted, names, strict=True)]
        ambiguous: list[str] = []
        found = self._exact(wanted, names, options, ambiguous)
        taken = {item.file for item in found if item}.union(claimed)
        # Labels whose paths are right do not name a missing image by a wrong path.
        pairs = zip(wanted, names, found, strict=True)
        with_paths = {entry.labels for entry, name, item in pairs if item and "/" in name}
        shared: dict[str, list[tuple[int, int]]] = {}  # by file: tail and row
        for row, (entry, possible) in enumerate(zip(wanted, options, strict=True)):
            rest = [option for option in possible if option.file not in taken]
            is_path = "/" in names[row] and is_plain_name(entry.name)
            if not rest or any(o.prefix is not None for o in possible):
                continue
            if is_path and entry.labels in with_paths:
                continue
            best = self._best(
                entry, rest, lambda o: (o.tail, o.is_in_split, -o.standard), ambiguous
            )
            if best:
                shared.setdefault(best.file, []).append((best.tail, row))
        for file, rows in shared.items():
            rows = rows if may_share else [(t, row) for t, row in rows if t == max(rows)[0]]
            if not may_share and len({(names[row], wanted[row].split) for _, row in rows}) > 1:
                entries = " and ".join(wanted[row].name for _, row in rows[:MAX_NAMED])
                ambiguous.append(f"{entries} ({file} fits each)")
            for _, row in rows:
                found[row] = Found(file, is_exact=False)
        refuse(labels, "images that fit several files", ambiguous, WHICH)
        return found

    def _exact(
        self,
        wanted: Sequence[Wanted],
        names: Sequence[str],
        options: Sequence[list[_Option]],
        ambiguous: list[str],
    ) -> list[Found | None]:
        """Find the images whose names are exact paths below one of the usual folders.

        Of several such folders, the one that has most images of the same labels is right. A file
        that a longer path of the same split names is that of a shorter one only if they differ in
        a standard folder: `images/a.jpg` and `a.jpg`.
        """
        exact = [[o for o in possible if o.prefix is not None] for possible in options]
        counts = Counter(
            (entry.labels, entry.split, option.prefix)
            for entry, possible in zip(wanted, exact, strict=True)
            for option in possible
        )
        depths = [name.count("/") for name in names]
        owners: dict[str, tuple[str, str | None]] = {}  # the longest name, and its split
        found: list[Found | None] = [None] * len(wanted)
        for row in sorted(range(len(wanted)), key=lambda row: -depths[row]):
            entry, depth = wanted[row], depths[row]

            def rank(option: _Option, entry: Wanted = entry, depth: int = depth) -> tuple[int, ...]:
                is_own = owners.get(option.file, ("", None))[0].count("/") <= depth
                count = counts[entry.labels, entry.split, option.prefix]
                evidence = option.tail, option.is_in_split, is_own, count
                return (*evidence, -option.standard, option.num_shared)

            free = []
            for option in exact[row]:
                longest, split = owners.get(option.file, (names[row], entry.split))
                lead = longest.removesuffix(names[row]).lower().split("/")
                is_same = split == entry.split and all(n in self.standard for n in lead if n)
                free += [option] if longest.count("/") <= depth or is_same else []
            if free and (best := self._best(entry, free, rank, ambiguous)):
                found[row] = Found(best.file, is_exact=True)
                owners.setdefault(best.file, (names[row], entry.split))
        return found

    def _name(self, name: str) -> str:
        """Return a name as labeling tools write it as a relative path."""
        name = name.replace("\\", "/")
        if "/local-files/?d=" in name:  # a URL of Label Studio's server
            name = unquote(name.partition("?d=")[2])
        parts = parts_of(name)
        if not parts:
            return ""
        if parts[-1] not in self.by_name and unquote(parts[-1]) in self.by_name:
            parts = [unquote(part) for part in parts]  # Label Studio's `/data/upload/3/a%20b.jpg`
        return "/".join(parts)

    def _options(self, entry: Wanted, name: str) -> list[_Option]:
        names = name.split("/")
        stem, has_suffix = names[-1].rpartition(".")[0], is_image_name(names[-1])
        files = self.by_name.get(names[-1], [])
        if entry.any_suffix or not has_suffix:
            files = [*files, *self.by_stem.get(stem if has_suffix else names[-1], ())]
        options = (self._option(entry, names, has_suffix, file) for file in dict.fromkeys(files))
        return [option for option in options if option is not None]

    def _option(
        self, entry: Wanted, names: list[str], has_suffix: bool, file: str
    ) -> _Option | None:
        """Return a file with the evidence for it; None if it is in the folder of another split."""
        parts, labels = self.files[file], _folders(entry.labels)
        base_name = parts[-1] if has_suffix else parts[-1].rpartition(".")[0]
        expected = [*_folders(entry.folder), *names]
        tail = 0
        if base_name == names[-1]:
            tail = 1 + _num_equal(reversed(expected[:-1]), reversed(parts[:-1]))
        is_full = tail >= len(names)
        before = parts[: -len(names)] if is_full else parts[:-1]
        num_shared = _num_equal(before, labels)
        rest = [part.lower() for part in before[max(num_shared, len(self.image_dir)) :]]
        split = split_of("/".join(rest))
        if entry.split and split not in (None, entry.split):
            return None
        positions = [self.standard.index(part) for part in rest if part in self.standard]
        if is_full and before == labels and labels[-1:] not in [[f] for f in ANNOTATION_FOLDERS]:
            positions = [-1]  # beside the labels
        elif is_full and not before and "" in self.standard:
            positions = [self.standard.index("")]
        is_exact = is_full and all(part in self.standard or split_of(part) for part in rest)
        return _Option(
            file,
            "/".join(before) if is_exact else None,
            tail,
            entry.split is not None and split_of("/".join(before)) == entry.split,
            min(positions, default=len(self.standard)),
            num_shared,
        )

    def _best(
        self, entry: Wanted, options: list[_Option], rank: _Rank, ambiguous: list[str]
    ) -> _Option | None:
        """Return the option with the best evidence; None if several are left, which are noted."""
        if len(options) > 1:
            best = max(map(rank, options))
            options = [option for option in options if rank(option) == best]
        if len(options) > 1:
            options = self._mirrored(entry, options)
        if len(options) > 1:
            options = [o for o in options if self._has_size(o.file, entry.size)] or options
        if len(options) == 1:
            return options[0]
        files = ", ".join(sorted(option.file for option in options)[:MAX_NAMED])
        ambiguous.append(f"{entry.name} ({files})")
        return None

    def _mirrored(self, entry: Wanted, options: list[_Option]) -> list[_Option]:
        """Return the options whose folders agree with the labels' folder wherever they differ.

        So `labels/val/1.txt` belongs to `images/val/1.jpg`, not to `images/train/val/1.jpg`, and
        `video1/annots/1.xml` to `video1/frames/1.jpg`, not to `video2/frames/1.jpg`.
        """
        folders = [self.files[option.file][:-1] for option in options]
        labels = [*parts_of(entry.labels), *parts_of(entry.name)[:-1]]
        pairs = zip(options, folders, strict=True)
        same = [o for o, folder in pairs if self._own(folder) == self._own(labels)]
        if len(same) == 1 or len({len(folder) for folder in folders}) > 1:
            return same or options
        differing = [n for n, parts in enumerate(zip(*folders, strict=True)) if len({*parts}) > 1]
        return [
            option
            for option, folder in zip(options, folders, strict=True)
            if differing and all(labels[n : n + 1] == [folder[n]] for n in differing)
        ] or options

    def _own(self, folder: Sequence[str]) -> list[str]:
        """Return the names of a path without those of usual folders of images and labels."""
        usual = (*self.standard, *(name.lower() for name in ANNOTATION_FOLDERS))
        return [name for name in folder if name.lower() not in usual]

    def _has_size(self, file: str, size: tuple[int, int]) -> bool:
        if not all(size):
            return False
        path = self.root / file
        return tuple(size) in (size_or_none(path), size_or_none(path, upright=True))


def located(
    finder: ImageFinder,
    splits: Mapping[str, tuple[Path, Sequence[LabeledImage]]],
    notes: list[str],
) -> dict[str, list[LabeledImage]]:
    """Return the images of each split, given with its label file, with the paths of their files.

    Paths that are not those of the files are noted.

    Raises:
        DataError: An image is missing, or fits several files.
    """
    wanted = [
        Wanted(
            image.file_name,
            label_folder(file, finder.root),
            split if len(splits) > 1 else None,
            (image.width, image.height),
        )
        for split, (file, part) in splits.items()
        for image in part
    ]
    labels = finder.root if len(splits) > 1 else next(iter(splits.values()))[0]
    found = finder.find(wanted, labels)
    missing = [entry.name for entry, item in zip(wanted, found, strict=True) if item is None]
    hint = "export with images, or copy them"
    refuse(labels, f"images that are not below {finder.root}", missing, hint)
    items = [item for item in found if item]
    other = [
        (entry.name, item.file)
        for entry, item in zip(wanted, items, strict=True)
        if "/" in entry.name and not item.is_exact
    ]
    notes += [_note_on_names(len(other), *pair) for pair in other[:1]]
    files = iter(item.file for item in items)
    return {
        split: [image._replace(file_name=next(files)) for image in part]
        for split, (_, part) in splits.items()
    }


def by_label_files(finder: ImageFinder, labels: Sequence[PurePosixPath]) -> list[Wanted]:
    """Return the image that each label file means by its own name, in a folder as the labels'.

    Folders such as `annotations` and `train` are the labels' own, and so are those that all share,
    except where folders of images have the same names.
    """
    folders = {path.parent for path in labels}
    common = len(PurePosixPath(os.path.commonpath(folders)).parts) if folders else 0
    of_images = {tuple(parts[:-1]) for parts in finder.files.values()}
    ends = {parts[start:] for parts in of_images for start in range(len(parts))}
    tops: dict[PurePosixPath, int] = {}
    for folder in folders:
        own = max((n for n, name in enumerate(folder.parts, 1) if _is_of_labels(name)), default=0)
        mirrored = (n for n in range(own, common) if folder.parts[n:] in ends)
        tops[folder] = next(mirrored, max(common, own))
    return [
        Wanted(
            "/".join([*path.parent.parts[tops[path.parent] :], path.stem]),
            "/".join(path.parent.parts[: tops[path.parent]]),
            split_of(path.parent.as_posix()),
        )
        for path in labels
    ]


def _is_of_labels(folder: str) -> bool:
    return folder in ANNOTATION_FOLDERS or split_of(folder) is not None


def label_folder(labels: Path, root: Path) -> str:
    """Return the folder of a label file, relative to the dataset folder; "" if it is not below."""
    below = labels.relative_to(root) if labels.is_relative_to(root) else PurePosixPath()
    return "/".join(below.parts[:-1])


def parts_of(path: str) -> list[str]:
    """Return the names of a path without those that would leave the dataset folder."""
    path = path.replace("\\", "/")
    return [part for part in path.split("/") if part not in ("", ".", "..")]


_folders = lru_cache(parts_of)  # of labels: the same for many images


def _num_equal(first: Iterable[str], second: Iterable[str]) -> int:
    """Return how many elements at the start of both are equal."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def resolve_images(splits: Mapping[str, Annotations]) -> dict[str, Resolved]:
    """Replace file names by paths of existing files, and absent image sizes by the files'.

    Returns also the files' sizes in bytes, None for a file that does not exist.
    """
    found = {split: _in_one_folder(annotations) for split, annotations in splits.items()}
    for root in {splits[split].folder for split, resolved in found.items() if resolved is None}:
        rest = {s: a for s, a in splits.items() if found[s] is None and a.folder == root}
        known = [images for images, _ in filter(None, found.values())]
        found |= {s: (images, []) for s, images in _searched(root, rest, known).items()}
    return {split: _complete(*resolved) for split, resolved in found.items() if resolved}


def _in_one_folder(annotations: Annotations) -> Resolved | None:
    """Return the annotations with the first folder that has all images; None if no folder has."""
    names = annotations.file_names
    if any("./" in name or "//" in name for name in names):
        return None  # two entries may be one file
    sample = names[:: max(1, len(names) // SAMPLE_NAMES)]
    for folder in annotations.image_folders or [annotations.folder]:
        if None not in file_sizes(folder, sample):
            num_bytes = file_sizes(folder, names)
            if None not in num_bytes:
                return annotations._replace(folder=folder), num_bytes
    return None


def _searched(
    root: Path, splits: Mapping[str, Annotations], known: Sequence[Annotations]
) -> dict[str, Annotations]:
    """Return the annotations with the names of the files below `root`.

    Files of the `known` annotations are taken.
    """
    wanted: list[Wanted] = []
    rows: list[tuple[str, int]] = []
    for split, images in splits.items():
        folder, sizes = label_folder(images.origin, root), images.sizes.tolist()
        is_below = images.origin.is_relative_to(root)
        word = split_of(f"{folder}/{images.origin.name}") if is_below else None
        for row, name in enumerate(images.file_names):
            slashes = name.replace("\\", "/")
            if is_plain_name(slashes) or TOOL_FOLDERS.intersection(slashes.split("/")):
                wanted.append(Wanted(name, folder, word, (sizes[row][0], sizes[row][1])))
                rows.append((split, row))
    claimed = {
        name if images.folder == root else (images.folder / name).relative_to(root).as_posix()
        for images in known
        if images.folder.is_relative_to(root)
        for name in images.file_names
    }
    finder = ImageFinder(root)
    found = finder.find(wanted, next(iter(splits.values())).origin, claimed)
    files: dict[str, dict[int, Found]] = {split: {} for split in splits}
    for (split, row), item in zip(rows, found, strict=True):
        if item is not None:
            files[split][row] = item
    return {split: _renamed(a, files[split]) for split, a in splits.items()}


def _renamed(annotations: Annotations, files: Mapping[int, Found]) -> Annotations:
    """Give found images the paths of their files, relative to the folder of all if there is one."""
    old = annotations.file_names
    names = [_plain(name) for name in old]
    ends = {
        found.file.removesuffix(names[row]) if found.file.endswith(names[row]) else ""
        for row, found in files.items()
    }
    prefix = ends.pop() if len(ends) == 1 else ""
    if not prefix.endswith("/"):
        prefix = ""
    for row, found in files.items():
        names[row] = found.file.removeprefix(prefix)
    changed = [row for row in files if names[row] != old[row]]
    notes = [_note_on_names(len(changed), old[row], names[row]) for row in changed[:1]]
    folder = annotations.folder / prefix
    return annotations._replace(folder=folder, file_names=names, notes=[*annotations.notes, *notes])


def _note_on_names(count: int, name: str, file: str) -> str:
    return (
        "file names that are not paths below the image folder, matched to the files there: "
        f"{count:,}, such as {name!r} to {file}"
    )


def _plain(name: str) -> str:
    """Return a relative path with slashes and without `./`; other names as they are."""
    slashes = name.replace("\\", "/")
    return "/".join(parts_of(slashes)) if is_plain_name(slashes) else name


def _complete(annotations: Annotations, num_bytes: list[int | None]) -> Resolved:
    """Merge entries of one file, and take absent image sizes from the files."""
    annotations = one_image_per_file(annotations)
    folder, names, sizes = annotations.folder, annotations.file_names, annotations.sizes
    if len(num_bytes) != len(names):
        num_bytes = file_sizes(folder, names)
    unsized = [row for row in np.nonzero((sizes == 0).any(axis=1))[0] if num_bytes[row] is not None]
    if not unsized:
        return annotations, num_bytes
    sizes, notes = sizes.copy(), [*annotations.notes]
    sizes[unsized] = in_threads(lambda row: size_or_none(folder / names[row]), unsized)
    if num_sized := int(sizes[unsized].all(axis=1).sum()):
        notes.append(f"images without width and height, taken from the files: {num_sized:,}")
    sizes[unsized] = sizes[unsized].clip(1)  # dropped when checked, with the reason
    return annotations._replace(sizes=sizes, notes=notes), num_bytes
