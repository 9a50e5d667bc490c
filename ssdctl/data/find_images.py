"""Find the image file that labels mean: one function for all formats.

    ImageFinder(root).find([Wanted("a.jpg", labels="annotations", split="val")], root / "val.csv")

Labels name an image by a path, with folders of another machine or without any, or by its stem. A
file may be meant if its name is equal (in Unicode's form NFC) and its folder is not that of another
split. It is an exact path if the name follows the folder of the labels or usual folders, such as
`images` and `train`. Exact paths come first. Of several files, in this order, the one:

1. whose path ends with most of the names in the label's path
2. in a folder with the name of the split
3. in a folder that has most images of the same labels, first of those with the suffix they give
4. with the suffix that the labels give
5. in the folder that the labels name
6. in the most usual folder
7. in the same folder as the folder of the labels
8. with the size that the labels give

Rule 3 alone does not take a file from the folder beside that of the label files: it may have fewer
images because some are missing. That is ambiguous.

An exact path is that of one entry; other entries get only files that no exact path names, so the
boxes of a missing image never go to another listed image. `val/a.jpg` in `images` and `a.jpg` in
`images/val` are one file: that of the folder of rule 2. If the paths of the same labels have
a beginning of another machine, an image that would need a different one is missing. What remains
ambiguous is an error, as is a file that two splits have with different boxes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple
from urllib.parse import unquote

from ssdctl.data.annotations import (
    MAX_NAMED,
    LabeledImage,
    nfc,
    refuse,
    split_of,
)
from ssdctl.data.image_files import (
    ANNOTATION_FOLDERS,
    files_below,
    is_image_name,
    size_or_none,
)
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

STANDARD = ("", "images", "JPEGImages", "img", "data")  # "": the dataset folder
OF_LABELS = {*(name.lower() for name in ANNOTATION_FOLDERS), "label_2"}
FEW = 8  # files of one stem, which are all looked at
EXACT: tuple[str, ...] = (".",)  # the lead of exact paths
NOT_READ = (".heic", ".heif")  # images of phones
LOCAL_FILES = "/local-files/?d="  # of a URL of Label Studio's server
SERVED: tuple[str, ...] = (LOCAL_FILES,)  # the lead of its paths
WHICH = (
    "choose their folder with --image-dir DIR, write paths below the dataset into the labels, or "
    "move one of them away"
)


class Wanted(NamedTuple):
    """An image as its labels name it."""

    name: str  # path, base name or stem
    labels: str = ""  # folder of the labels, relative to the dataset folder
    split: str | None = None  # files in folders of other splits do not count; None: all count
    size: tuple[int, int] = (0, 0)  # declared width and height in pixels; 0: not given
    is_label_file: bool = False  # it is that of a label file, without suffix
    is_stem: bool = False  # it has no suffix, whatever it ends with
    suffix: str = ""  # that the label file gives; another will do
    folder: str = ""  # named by the labels as the folder of the image

    @property
    def place(self) -> tuple[str, str | None]:
        """Return what is common to the label files of a folder."""
        return self.labels, self.split


class Found(NamedTuple):
    file: str  # relative to the dataset folder
    is_exact: bool


class _Option(NamedTuple):
    """A file that may be the wanted image."""

    file: str
    is_exact: bool  # the name is a path to it from a usual folder
    tail: int  # number of folders at the end of the path that agree
    lead: tuple[str, ...]  # the beginning of the name, which is not that of the file's path
    prefix: str  # what its path has instead
    is_beside: bool  # its folder is in the same one as that of the label files
    evidence: tuple[int, ...]


class _Row(NamedTuple):
    entry: Wanted
    name: str  # a relative path
    options: list[_Option]

    @property
    def is_path(self) -> bool:
        return self.entry.is_label_file or "/" in self.name

    @property
    def key(self) -> str | None:
        """Return the labels that name images as this one does; None: all label files."""
        return None if self.entry.is_label_file else self.entry.labels


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
        self.image_dir = parts_of(nfc(image_dir or ""))
        found = [*(files_below(root) if files is None else files)]
        if phone_files := {file for file in found if file.lower().endswith(NOT_READ)}:
            others = {*map(stem_of, phone_files.symmetric_difference(found))}
            found = [f for f in found if f not in phone_files or stem_of(f) not in others]
        paths = ((file, nfc(file).split("/")) for file in found)
        self.files = {
            file: parts
            for file, parts in paths
            if is_image_name(parts[-1]) and parts[: len(self.image_dir)] == self.image_dir
        }
        if image_dir and not self.files:
            raise DataError(f"--image-dir {image_dir}: no images below {root / image_dir}")
        self.by_stem: dict[str, list[str]] = {}
        self._by_end: dict[int, dict[tuple[str, ...], list[str]]] = {}  # by number of folders
        for file, parts in self.files.items():
            self.by_stem.setdefault(stem_of(parts[-1]), []).append(file)

    def find(
        self,
        wanted: Sequence[Wanted],
        labels: Path,
        *,
        may_share: bool = False,
    ) -> list[Found | None]:
        """Return the file of each image, None if it is missing.

        Entries with the same exact path get the same file, others only if they `may_share` it.

        Raises:
            DataError: An image fits several files; the message begins with `labels`.
        """
        given = [self._name(entry.name) for entry in wanted]
        bases = {name.rpartition("/")[2] for name in given}
        spelled = [self._spelled(name, bases) for name in given]
        named = list(zip(wanted, spelled, strict=True))
        exact = [self._exact_options(entry, name) for entry, name in named]
        # Where all label files of a folder have exact paths, other files do not count.
        others = {entry.place for entry, options in zip(wanted, exact, strict=True) if not options}
        rows = [
            _Row(entry, name, self._options(entry, name) if entry.place in others else options)
            for (entry, name), options in zip(named, exact, strict=True)
        ]
        rows = self._without_outranked(_with_counts(rows))
        ambiguous: list[str] = []
        found = self._exact(rows, ambiguous)
        self._by_tail(rows, found, ambiguous, may_share=may_share)
        refuse(labels, "images that fit several files", ambiguous, WHICH)
        return [
            item and item._replace(is_exact=item.is_exact and name == spelling)
            for item, name, spelling in zip(found, given, spelled, strict=True)
        ]

    def _without_outranked(self, rows: Sequence[_Row]) -> list[_Row]:
        """Return the images without files that are another image of the same labels.

        `val/a.jpg` of `images` and `a.jpg` of `images/val` are one file. It is that of the folder
        with the name of the split, unless the longer name is its path below the dataset folder.
        """
        claims: dict[tuple[object, ...], set[tuple[int, str]]] = {}

        def others(row: _Row, option: _Option) -> set[tuple[int, str]]:
            return claims.setdefault((row.key, row.entry.split, option.lead, option.file), set())

        for row in rows:
            for option in row.options if row.key is not None else ():
                others(row, option).add((option.evidence[1], option.prefix))

        def is_first(row: _Row, option: _Option) -> bool:
            stronger = (prefix for e, prefix in others(row, option) if e > option.evidence[1])
            same = (self._is_same_folder(prefix, option.prefix) for prefix in stronger)
            return not option.prefix or all(same)

        return [row._replace(options=[o for o in row.options if is_first(row, o)]) for row in rows]

    def _is_same_folder(self, first: str, second: str) -> bool:
        """Return whether one path has only usual folders of images after the other."""
        shorter, longer = sorted((first, second), key=len)
        rest = longer.removeprefix(shorter).split("/")
        return all(part.lower() in self.standard for part in rest)

    def _exact(self, rows: Sequence[_Row], ambiguous: list[str]) -> list[Found | None]:
        """Find the images whose names are exact paths below one of the usual folders.

        A file that a longer path names is that of a shorter one only if they differ in a standard
        folder: `images/a.jpg` and `a.jpg`. If the same labels name `val/b.jpg` in `images`, then
        `images/val/a.jpg` is not their `a.jpg`.
        """
        owners = dict[str, str]()  # by file: the longest name
        found: list[Found | None] = [None] * len(rows)
        named: set[tuple[object, ...]] = set()  # labels, and a folder within their names
        for n in sorted(range(len(rows)), key=lambda n: -rows[n].name.count("/")):
            name, key = rows[n].name, (rows[n].key, rows[n].entry.split)
            exact = [option for option in rows[n].options if option.is_exact]
            options = [option for option in exact if (*key, option.prefix) not in named]
            free = [o for o in options if owners.get(o.file, name) == name]
            free = free or [o for o in options if self._is_same(owners[o.file], name)]
            if free and (best := self._best(rows[n].entry, free, ambiguous)):
                found[n] = Found(best.file, is_exact=True)
                owners.setdefault(best.file, name)
                named |= {(*key, folder) for folder in self._named_by(rows[n], best)}
        return found

    def _by_tail(
        self,
        rows: Sequence[_Row],
        found: list[Found | None],
        ambiguous: list[str],
        *,
        may_share: bool,
    ) -> None:
        """Find images that no exact path names, among files that are not taken.

        If the paths of the same labels begin with `/home/me`, and go on as those of the files do,
        then an image that needs another beginning is missing. If names without folders are exact
        paths, then an image of a relative folder that no file is in is missing.
        """
        exact = {(row.key, row.is_path) for row, item in zip(rows, found, strict=True) if item}
        right = {(key, lead) for key, is_path in exact if is_path for lead in (EXACT, SERVED)}
        taken = {item.file for item in found if item}
        chosen = dict[int, _Option]()
        for n, row in enumerate(rows):
            free = [option for option in row.options if option.file not in taken]
            if found[n] or not free or any(option.is_exact for option in row.options):
                continue
            if best := self._best(row.entry, free, ambiguous):
                chosen[n] = best
                right |= {(row.key, best.lead)} if row.is_path else set()
        named = {
            (rows[n].key, option.lead, folder)
            for n, option in chosen.items()
            for folder in self._named_by(rows[n], option)
        }
        beside = {rows[n].entry.place for n, option in chosen.items() if option.is_beside}
        rivals: dict[str, list[int]] = {}  # rows by file
        for n, option in chosen.items():
            shorter = ((rows[n].key, option.lead[:end]) for end in range(1, len(option.lead)))
            is_absent = rows[n].is_path and not option.tail and option.lead[:1] == EXACT
            is_other = (rows[n].key, option.lead, option.prefix) in named
            is_other |= is_absent and (rows[n].key, False) in exact
            is_other |= rows[n].entry.place in beside and not option.is_beside
            if not is_other and not any(lead in right for lead in shorter):
                rivals.setdefault(option.file, []).append(n)
        for file, several in rivals.items():
            # An absolute path names one image, also if two splits have it.
            names = {
                (rows[n].name, _is_relative(rows[n].entry.name) and rows[n].entry.split)
                for n in several
            }
            if not may_share and len(names) > 1:
                entries = " and ".join(rows[n].entry.name for n in several[:MAX_NAMED])
                ambiguous.append(f"{entries} ({file} fits each)")
            for n in several:
                found[n] = Found(file, is_exact=False)

    def _named_by(self, row: _Row, option: _Option) -> list[str]:
        """Return the folders of a file that the name of an image has, without usual ones."""
        folders = row.name.split("/")[-1 - option.tail : -1] if row.key is not None else []
        paths = itertools.accumulate(folders, lambda *names: "/".join(names), initial=option.prefix)
        below = zip(folders, itertools.islice(paths, 1, None), strict=True)
        return [path.lstrip("/") for name, path in below if name.lower() not in self.standard]

    def _is_same(self, longer: str, name: str) -> bool:
        lead = longer.removesuffix(name).split("/")
        return all(part.lower() in self.standard for part in lead)

    def _name(self, name: str) -> str:
        """Return a name as labeling tools write it as a relative path."""
        name = nfc(name.replace("\\", "/"))
        if LOCAL_FILES in name:
            name = unquote(name.partition("?d=")[2])
        parts = parts_of(name)
        if not parts:
            return ""
        if stem_of(parts[-1]) not in self.by_stem and stem_of(unquote(parts[-1])) in self.by_stem:
            parts = [unquote(part) for part in parts]  # Label Studio's `/data/upload/3/a%20b.jpg`
        return "/".join(parts)

    def _options(self, entry: Wanted, name: str) -> list[_Option]:
        names = name.split("/")
        stem, base_name = names[-1], ""
        # A label file's name may have the suffix of its image: a.jpg.txt
        is_stem = (entry.is_label_file or entry.is_stem) and stem in self.by_stem
        if not is_stem and is_image_name(stem):
            stem, base_name = stem_of(stem), stem
        files = self.by_stem.get(stem, [])
        nearer = [files]
        for depth in range(1, len(names)):
            if depth > 1 and len(nearer[-1]) <= FEW:
                break
            nearer.append(self._below(stem, names[-1 - depth : -1]))

        def fitting(files: list[str]) -> list[_Option]:
            named = [f for f in files if base_name in ("", self.files[f][-1])]
            return self._fitting(entry, names, named)

        # Others are worse, and a video's frames have the names of those of each other video.
        return next(filter(None, map(fitting, reversed(nearer))), [])

    def _exact_options(self, entry: Wanted, name: str) -> list[_Option]:
        """Return the files to which the path of a label file is an exact one."""
        *folders, stem = names = name.split("/")
        files = self.by_stem.get(stem, []) if entry.is_label_file else []
        if len(files) > FEW:
            labels, below = _folders(nfc(entry.labels)), self._unusual(folders)
            starts: list[list[str]] = [self._own(labels), self._unusual(labels), []]
            keys = dict.fromkeys((stem, *start, *below) for start in starts)
            found = (item for key in keys for item in self._by_folders.get(key, ()))
            files = [file for _, file in sorted(found)]
        return [option for option in self._fitting(entry, names, files) if option.is_exact]

    @cached_property
    def _spellings(self) -> dict[str, set[str]]:
        """The base names and stems of the files by their lower case, one on Windows and macOS."""
        found: dict[str, set[str]] = {}
        for parts in self.files.values():
            for name in (parts[-1], stem_of(parts[-1])):
                found.setdefault(name.lower(), set()).add(name)
        return found

    def _spelled(self, name: str, wanted: Collection[str]) -> str:
        """Return a path whose base name is spelled as the only files that differ in case from it.

        A file that is `wanted` by its own spelling is not that of another one.
        """
        folder, slash, base = name.rpartition("/")
        found, *others = self._spellings.get(base.lower(), {base})
        return name if others or found in wanted else folder + slash + found

    def _below(self, stem: str, folders: list[str]) -> list[str]:
        """Return the files with a stem whose paths end with the folders."""
        depth = len(folders)
        if depth not in self._by_end:
            ends = self._by_end[depth] = {}
            for file, parts in self.files.items():
                ends.setdefault((stem_of(parts[-1]), *parts[-1 - depth : -1]), []).append(file)
        return self._by_end[depth].get((stem, *folders), [])

    @cached_property
    def _by_folders(self) -> dict[tuple[str, ...], list[tuple[int, str]]]:
        """Numbered files by stem and by folders without usual ones, if many have the stem."""
        files = dict[tuple[str, ...], list[tuple[int, str]]]()
        for stem, several in self.by_stem.items():
            for item in enumerate(several) if len(several) > FEW else ():
                key = stem, *self._unusual(self.files[item[1]][:-1])
                files.setdefault(key, []).append(item)
        return files

    def _fitting(self, entry: Wanted, names: list[str], files: list[str]) -> list[_Option]:
        options = (self._option(entry, names, file) for file in files)
        return [option for option in options if option is not None]

    def _option(self, entry: Wanted, names: list[str], file: str) -> _Option | None:
        """Return a file with the evidence for it; None if it is in the folder of another split."""
        *folders, base_name = self.files[file]
        labels = _folders(nfc(entry.labels))
        tail = _num_equal(reversed(names[:-1]), reversed(folders))
        before = folders[: len(folders) - tail]
        split = split_of("/".join(before[len(self.image_dir) :]))
        if entry.split and split not in (None, entry.split):
            return None
        own = self._unusual(before)
        is_theirs = own == self._own(labels) or before == labels
        foreign = own if entry.is_label_file else [name for name in own if not split_of(name)]
        is_usual = not foreign and (before != [] or not entry.is_label_file)
        usual = [self.standard.index(n.lower()) for n in before if n.lower() in self.standard]
        evidence = (
            tail,
            entry.split is not None and split == entry.split,
            base_name == names[-1] + entry.suffix,
            folders[-1:] == [entry.folder],
            -min(usual, default=len(self.standard)),
            bool(labels[:-1]) and folders[:-1] == labels[:-1],
        )
        is_beside = bool(labels[:-1]) and before[:-1] == labels[:-1] and before != labels
        start = [*EXACT, "*"] if _is_relative(entry.name) else ["/"]
        start = [*SERVED] if LOCAL_FILES in entry.name else start
        lead = [*start, *names[: len(names) - tail - 1]]
        return _Option(
            file=file,
            is_exact=tail == len(names) - 1 and (is_theirs or is_usual),
            tail=tail,
            lead=tuple(lead),
            prefix="/".join(before),
            is_beside=entry.is_label_file and is_beside,
            evidence=evidence,
        )

    def _unusual(self, folders: Sequence[str]) -> list[str]:
        return [name for name in folders if name.lower() not in self.standard]

    def _own(self, folders: Sequence[str]) -> list[str]:
        """Return the names of a path without those of usual folders of images and labels."""
        usual = (name.lower() in OF_LABELS or name.lower() in self.standard for name in folders)
        return [name for name, is_usual in zip(folders, usual, strict=True) if not is_usual]

    def _best(self, entry: Wanted, options: list[_Option], ambiguous: list[str]) -> _Option | None:
        """Return the option with the best evidence; None if several are left, which are noted."""
        if len(options) > 1:
            best = max(options, key=lambda option: option.evidence)
            equal = best.evidence if best.is_beside else best.evidence[:3]
            options = [
                option
                for option in options
                if option.evidence == best.evidence
                or (option.is_beside and option.evidence[: len(equal)] == equal)
            ]
        if len(options) > 1:
            options = [o for o in options if self._has_size(o.file, entry.size)] or options
        if len(options) == 1:
            return options[0]
        files = ", ".join(sorted(option.file for option in options)[:MAX_NAMED])
        ambiguous.append(f"{entry.name} ({files})")
        return None

    def _has_size(self, file: str, size: tuple[int, int]) -> bool:
        if not all(size):
            return False
        path = self.root / file
        return tuple(size) in (size_or_none(path), size_or_none(path, upright=True))

    def with_stem(self, name: str) -> list[str]:
        """Return the images with this name without its suffix, in any folder."""
        return self.by_stem.get(nfc(name), [])

    def of_label_files(self, labels: Sequence[PurePosixPath]) -> list[Wanted]:
        """Return the image that each label file means by its own path.

        Folders are the image's if they are below a usual one such as `labels` or `train`.
        """

        def wanted(path: PurePosixPath) -> Wanted:
            folders = path.parent.parts
            usual = [
                n for n, name in enumerate(folders, 1) if split_of(name) or not self._own([name])
            ]
            start = max(usual, default=len(folders))
            name, folder = "/".join((*folders[start:], path.stem)), "/".join(folders[:start])
            return Wanted(name, folder, split_of("/".join(folders)), is_label_file=True)

        return [wanted(path) for path in labels]


def _with_counts(rows: Sequence[_Row]) -> list[_Row]:
    """Add to the evidence how many names of the same labels agree on what their beginning means.

    Before it: how many of them with the suffix that the labels give.
    """
    counts, named = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for row in rows:
        beginnings = {(option.lead, option.prefix): False for option in row.options}
        for option in row.options:
            beginnings[option.lead, option.prefix] |= bool(option.evidence[2])
        for beginning, has_suffix in beginnings.items():
            key = (row.entry.labels, row.entry.split, *beginning)
            counts[key] += 1
            named[key] += has_suffix

    def counted(row: _Row, option: _Option) -> _Option:
        tail, is_in_split, *others = option.evidence
        key = (row.entry.labels, row.entry.split, option.lead, option.prefix)
        return option._replace(evidence=(tail, is_in_split, named[key], counts[key], *others))

    return [row._replace(options=[counted(row, o) for o in row.options]) for row in rows]


def stem_of(name: str) -> str:
    """Return a base name without the suffix of an image."""
    return name.rpartition(".")[0] if is_image_name(name) else name


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
    entries = {
        split: (file, [(image.file_name, (image.width, image.height)) for image in part])
        for split, (file, part) in splits.items()
    }
    found = find_in_splits(finder, entries)
    names = [image.file_name for _, part in splits.values() for image in part]
    items = list(itertools.chain(*found.values()))
    labels = finder.root if len(splits) > 1 else next(iter(splits.values()))[0]
    missing = [name for name, item in zip(names, items, strict=True) if item is None]
    hint = "export with images, or copy them"
    refuse(labels, f"images that are not below {finder.root}", missing, hint)
    notes += notes_on_names(names, items)
    return {
        split: [
            image._replace(file_name=item.file)
            for image, item in zip(part, found[split], strict=True)
            if item
        ]
        for split, (_, part) in splits.items()
    }


def find_in_splits(
    finder: ImageFinder,
    splits: Mapping[str, tuple[Path, Sequence[tuple[str, tuple[int, int]]]]],
) -> dict[str, list[Found | None]]:
    """Return the file of each image, given by name and size, of the label file of each split."""
    wanted = []
    for split, (file, images) in splits.items():
        folder = label_folder(file, finder.root)
        word = split if len(splits) > 1 else split_of(f"{folder}/{file.name}")
        wanted += [Wanted(name, folder, word, size) for name, size in images]
    labels = finder.root if len(splits) > 1 else next(iter(splits.values()))[0]
    found = iter(finder.find(wanted, labels))
    return {split: [next(found) for _ in images] for split, (_, images) in splits.items()}


def notes_on_names(names: Sequence[str], found: Sequence[Found | None]) -> list[str]:
    other = [
        f"{name!r} to {item.file}"
        for name, item in zip(names, found, strict=True)
        if item and not item.is_exact and nfc(item.file.rpartition("/")[2]) != nfc(name)
    ]
    what = "file names that are not paths below the image folder, matched to the files there"
    return [f"{what}: {len(other):,}, such as {pair}" for pair in other[:1]]


def label_folder(labels: Path, root: Path) -> str:
    """Return the folder of a label file, relative to the dataset folder; "" if it is not below."""
    below = labels.relative_to(root) if labels.is_relative_to(root) else PurePosixPath()
    return "/".join(below.parts[:-1])


def _is_relative(name: str) -> bool:
    """Return whether a name is a relative path in the dataset folder, also as Windows writes it."""
    return is_plain_name(name.replace("\\", "/")) and not PureWindowsPath(name).drive


def parts_of(path: str) -> list[str]:
    """Return the names of a path without those that would leave the dataset folder."""
    path = path.replace("\\", "/")
    return [part for part in path.split("/") if part not in ("", ".", "..")]


_folders = lru_cache(parts_of)  # of labels: the same for many images


def _num_equal(first: Iterable[str], second: Iterable[str]) -> int:
    """Return how many elements at the start of both are equal."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
