"""Read YOLO's format: a text file per image, `class cx cy width height` in fractions of it.

The names come from data.yaml (a list or a table), from Darknet's `*.data`, from classes.txt, or
from the only `*.names`. Images are those that data.yaml or `*.data` names, as folders, lists or
files, if they are below the dataset folder, or those of the usual folders. A line may also be a
polygon, or have keypoints after the box if data.yaml has `kpt_shape`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import yaml

from ssdctl.data.annotations import (
    MAX_NAMED,
    SPLIT_WORDS,
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    nfc,
    note_copies,
    place,
    refuse,
    split_of,
)
from ssdctl.data.find_images import ImageFinder, Wanted, parts_of
from ssdctl.data.formats import head_of, in_pixels, read_lines, with_words
from ssdctl.data.image_files import (
    dataset_folder,
    files_below,
    in_threads,
    is_image,
    is_image_name,
    size_or_none,
)
from ssdctl.errors import DataError
from ssdctl.files import DistinctKeys, read_errors, read_limited, read_text
from ssdctl.runtime.safe_text import counted, listed

LOOKED_FOR = ("data.yaml", "classes.txt", "*.names")
NAME_FILES = ("classes.txt", "obj.names")
NAMES_BELOW = ("labels/classes.txt", "images/classes.txt", "labels/train/classes.txt")
YAML = (".yaml", ".yml")
SLACK = 0.01  # boxes overshoot their image by rounding; the check clips them
MAX_YAML_BYTES = 1 << 20
MAX_LABEL_BYTES = 16 << 20  # labels of an image, or class names
MAX_LIST_BYTES = 1 << 28  # paths of images
MAX_DEPTH = 3  # folders above a *.names and classes.txt, and one
FOLDERS = ("images", "img", "JPEGImages", "data", "")  # of images; "": the dataset folder
MAX_TRIED = 200  # label files
# A data.yaml, or Darknet's file, and its content: text, lists and tables.
_Description = tuple[Path, dict[str, Any]]


class _Listed(NamedTuple):
    """An image in a list of images, or in data.yaml."""

    split: str
    path: Path  # of the list
    folder: str  # of the list, relative to the dataset folder
    name: str


class _Loader(DistinctKeys, yaml.BaseLoader):
    """Loads every value as text: a class may have the name `no`."""


def recognize(path: Path) -> Path | None:
    """Return the file of class names of a folder that has labels, or data.yaml."""
    if path.is_file():
        return path if path.suffix.lower() in (*YAML, ".data") else None
    if described := _read_yaml(path):
        return described[0]
    names = [*files_below(path)]
    texts = (path / name for name in names if name.lower().endswith(".txt"))
    tried = [*itertools.islice(itertools.filterfalse(_is_empty, texts), MAX_TRIED)]
    if not any(map(has_boxes, tried)):
        stems = {PurePosixPath(name).stem for name in names if is_image_name(name)}
        if not any(text.stem in stems and has_boxes(text, in_pixels=True) for text in tried):
            return None  # files of names may be another program's
    found = _find_darknet(path)
    return found[0] if found else None


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of a data.yaml; classes in the order of their numbers."""
    root, file = dataset_folder(path), path if path.is_file() else None
    described = _read_yaml(root, file) or _read_darknet(root, file)
    if described is None:
        raise DataError(
            f"{root}: not YOLO's format: neither a data.yaml with names nor a classes.txt",
            hint="write data.yaml with `names: [cat, dog]`, in the order of the class numbers",
        )
    origin, content = described
    notes: list[str] = []
    names = _class_names(origin, content)
    everything = list(files_below(root))
    all_images = finder = ImageFinder(root, FOLDERS, image_dir, files=everything)
    named = _named_images(finder, origin, content, notes)
    if named.get("train"):
        # Only images that are named count, and those of other splits.
        files = set(itertools.chain(*named.values()))
        files |= {f for f in finder.files if split_of(f.rpartition("/")[0]) not in (None, *named)}
        finder = ImageFinder(root, FOLDERS, image_dir, files=files)
    texts = [PurePosixPath(name) for name in everything if name.lower().endswith(".txt")]
    texts = [text for text in texts if not _is_list(root, text)]
    own = [text for text in texts if finder.with_stem(text.stem)]
    labels, used = _label_files(finder, sorted(own), notes)
    _require_same_names(root, used, origin, names)
    by_split = _with_unnamed(finder, labels, named, notes)
    unused = sorted(_without_image(texts, used, finder, all_images, notes))
    if full := [text for text in unused if has_boxes(root / text)]:
        count = f"{len(full):,}, such as {full[0]}"
        notes.append(f"label files without an image, left out: {count}")
    splits = {
        split: _read_split(root, files, labels, names, notes, "kpt_shape" in content)
        for split, files in by_split.items()
    }
    if not any(image.boxes for images in splits.values() for image in images):
        raise _no_labels(root, [*finder.files], texts, labels)
    # Trainers that use this format show images upright, so the boxes fit that view.
    annotations = from_images(splits, names, root, origin, notes)
    without = [str(text) for text in unused]
    return {s: a._replace(upright=True, without_image=without) for s, a in annotations.items()}


def _is_list(root: Path, text: PurePosixPath) -> bool:
    """Return whether `train.txt` lists images; it may as well be the labels of a `train.jpg`."""
    if split_of(text.stem) is None:
        return False
    with contextlib.suppress(DataError):  # in another encoding, so it is a note
        line = next((line for _, line in read_lines(root / text, MAX_LIST_BYTES)), "")
        return is_image(PurePosixPath(line.strip()))
    return False


def _is_empty(path: Path) -> bool:
    """Return whether a file is that of an image without objects."""
    with contextlib.suppress(OSError):  # a broken link
        return not path.stat().st_size
    return False


def has_boxes(path: Path, *, in_pixels: bool = False) -> bool:
    """Return whether the first line of a text file is a class number and a box in fractions.

    Args:
        in_pixels: The box may be in pixels, which is refused with an explanation later.
    """
    with contextlib.suppress(ValueError, OverflowError):
        line, end, _ = head_of(path).lstrip().partition("\n")
        words = line.split()
        index, *numbers = map(float, words if end else words[: max(len(words) - 1, 5)])  # cut
        return (
            index == int(index) >= 0
            and len(numbers) >= 4
            and (_are_fractions(numbers[:4]) or (in_pixels and min(numbers[:4]) >= 0))
        )
    return False


def _read_yaml(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of the YAML file that has `names`; None if there is none."""
    candidates = [file] if file else [root / "data.yaml", root / "dataset.yaml"]
    if file is None:  # other programs' files may have another encoding, or several documents
        candidates += with_words(sorted([*root.glob("*.yaml"), *root.glob("*.yml")]), b"names")
    for path in candidates:
        if path.suffix.lower() not in YAML or not path.is_file():
            continue
        try:
            with read_errors(path):
                content = yaml.load(read_text(path, MAX_YAML_BYTES), Loader=_Loader)
        except (yaml.YAMLError, RecursionError) as error:
            raise DataError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
        if isinstance(content, dict) and "names" in content:
            return path, content
    return None


def _read_darknet(root: Path, file: Path | None = None) -> _Description | None:
    """Return the content of Darknet's `*.data` or of a file of class names, or None."""
    if (found := _find_darknet(root, file)) is None:
        return None
    origin, content, names = found
    return origin, {**content, "names": _read_names(names)}


def _find_darknet(root: Path, file: Path | None = None) -> tuple[Path, dict[str, Any], Path] | None:
    """Return Darknet's `*.data` or a file of class names, its content, and the file of names."""
    below = [root / name for name in files_below(root, MAX_DEPTH)]
    found = [path for path in below if path.suffix == ".names"]
    names = _names_file(root, below) or (found[0] if len(found) == 1 else None)
    for path in [file] if file else [path for path in below if path.suffix == ".data"]:
        if path.stat().st_size > MAX_YAML_BYTES:
            continue
        with read_errors(path):  # a comment may have another encoding
            text = read_limited(path, MAX_YAML_BYTES).decode("utf-8-sig", "replace")
        pairs = [line.partition("=") for line in text.splitlines()]
        content: dict[str, Any] = {k.strip(): v.strip() for k, is_set, v in pairs if is_set}
        if "names" in content:
            tail = parts_of(content["names"])
            bases = itertools.product((path.parent, root), range(len(tail)))
            exact = (base.joinpath(*tail[start:]) for base, start in bases)
            same_name = (path for path in found if [path.name] == tail[-1:])
            files = (path for path in itertools.chain(exact, same_name) if path.is_file())
            named = next(files, names)
            if named is None:
                problem = f"{path}: names: {content['names']} is not below {root}"
                raise DataError(problem, hint="copy it beside this file")
            return path, content, named
    return (names, {}, names) if names else None


def _names_file(root: Path, below: list[Path]) -> Path | None:
    """Return the usual file of class names, or one of those in the folders of splits."""
    for name in (*NAME_FILES, *NAMES_BELOW):
        if (root / name).is_file() and not has_boxes(root / name):
            return root / name
    named = [path for path in below if path.name == NAME_FILES[0] and not has_boxes(path)]
    files = [path for path in named if split_of(path.parent.relative_to(root).as_posix())]
    for path in files:
        if _read_names(path) != _read_names(files[0]):
            problem = f"{path}: not the class names of {files[0]}"
            raise DataError(problem, hint=f"write one {root / 'data.yaml'} with names for all")
    return files[0] if files else None


def _read_names(path: Path) -> list[str]:
    """Return the class names of a file, one per line; only the last lines may be blank."""
    with read_errors(path):
        text = read_text(path, MAX_LABEL_BYTES).rstrip()
    names = [nfc(line.strip()) for line in text.splitlines()]
    if "" in names:
        raise DataError(
            f"{path}:{names.index('') + 1}: a blank line before other class names",
            hint="remove the line, or write the name of the class with its number",
        )
    return names


def _class_names(path: Path, content: dict[str, Any]) -> list[str]:
    names = content["names"]
    if isinstance(names, dict):
        numbers = [str(n) for n in range(len(names))]
        if set(names) != set(numbers):
            raise DataError(f"{path}: names must be numbered from 0 without a gap")
        names = [names[n] for n in numbers]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise DataError(f"{path}: names must be a list or a table of class names")
    names = [*map(nfc, names)]
    count = content.get("nc", str(len(names)))
    if count != str(len(names)):
        raise DataError(f"{path}: nc is {count}, but there are {counted(len(names), 'name')}")
    refuse(path, "class names occur twice", [n for n, c in Counter(names).items() if c > 1])
    return names


def _require_same_names(
    root: Path, labels: Collection[PurePosixPath], origin: Path, names: list[str]
) -> None:
    """Refuse label files in a folder whose own file has other class names, or in another order.

    A classes.txt may be the label file of a classes.jpg.
    """
    folders = {folder for text in labels for folder in (text.parent, *text.parent.parents)}
    for folder in sorted(folders.difference([PurePosixPath()])):
        files = [root / folder / name for name in NAME_FILES if folder / name not in labels]
        found = [(file, _read_names(file)) for file in files if file.is_file()]
        if described := _read_yaml(root / folder):
            found.append((described[0], _class_names(*described)))
        for file, own in found:
            if own != names[: len(own)]:
                raise DataError(
                    f"{file}: not the class names of {origin}, or not in their order",
                    hint="give all labels the same numbers, or prepare the folders one by one",
                )


def _named_images(
    finder: ImageFinder, origin: Path, content: dict[str, Any], notes: list[str]
) -> dict[str, list[str]]:
    """Return the image files of each split that data.yaml names, if there are any.

    Paths that do not exist are noted. Folders named after the split replace them.
    """
    base = content.get("path")
    before = parts_of(base) if isinstance(base, str) else []
    named: dict[str, list[str]] = {}
    used: dict[str, tuple[str, list[str]]] = {}  # what each folder is used for
    stale: dict[str, str] = {}  # the problem, by split
    listed: list[_Listed] = []
    for split, text in _entries(content):
        if is_image(PurePosixPath(text)):
            listed.append(_Listed(split, origin, "", text))
            continue
        parts = parts_of(nfc(text))
        found = _below(finder, before, parts)
        if found is None:
            problem = f"{split}: {text} is not below {finder.root}, or has no images"
            stale.setdefault(split, f"{origin}: {problem}")
            notes.append(f"{origin.name}: {problem}: left out")
            continue
        entry, other = used.setdefault(found, (f"{split}: {text}", parts))
        if other != parts:
            problem = f"{origin}: {entry} and {split}: {text} are both {found or '.'}"
            raise DataError(problem, hint="correct the paths, which are relative to this file")
        own = parts_of(found)
        if own and [*before, *parts][-len(own) :] != own:
            notes.append(f"{origin.name}: {split}: {text}: {found} is used")
        if found.endswith(".txt"):
            path, folder = finder.root / found, found.rpartition("/")[0]
            names = (line.strip() for _, line in read_lines(path, MAX_LIST_BYTES))
            listed += [_Listed(split, path, folder, name) for name in names]
        else:
            images = (f for f, names in finder.files.items() if names[: len(own)] == own)
            named.setdefault(split, []).extend(images)
    for split, files in _listed_images(finder, origin, listed).items():
        named.setdefault(split, []).extend(files)
    found_splits = {split: sorted(set(files)) for split, files in named.items() if files}
    words = {split_of(file.rpartition("/")[0]) for file in finder.files}
    if "train" in stale and "train" not in words | {*found_splits}:
        hint = "correct it, or delete train, val and test: the folders are then the splits"
        whole = (finder.root / str(base or "")).resolve()
        if whole.is_dir() and not whole.is_relative_to(finder.root.resolve()):
            hint = f"its path is {whole}: copy {origin.name} into that folder, and name that one"
        raise DataError(stale["train"], hint=hint)
    return found_splits


def _entries(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each split that data.yaml has, and a folder, list or image that it names."""
    for key, entries in content.items():
        split = SPLIT_WORDS.get(key.lower()) if isinstance(key, str) else None
        for entry in entries if isinstance(entries, list) else [entries]:
            if split is not None and isinstance(entry, str) and entry:
                yield split, entry


def _below(finder: ImageFinder, before: list[str], parts: list[str]) -> str | None:
    """Return a list of images, or a folder with images, which may have another path than written.

    Leading folders may be absent, and the folder of the split may have another usual name, as `val`
    for `valid`. A folder of a split is never left out. A link may be to a folder that is read.
    """
    written = _ends(before, parts)
    ends = [*_with_renamed(written, split_of("/".join(parts)))]
    for end in ends:
        path = "/".join(end)
        if path.endswith(".txt") and (finder.root / path).is_file():
            return path
        if any(own[: len(end)] == end for own in finder.files.values()):
            return path
    links = [finder.root.joinpath(*end).resolve() for end in ends if end]
    folders = {tuple(own[:n]) for own in finder.files.values() for n in range(1, len(own))}
    same = sorted(f for f in folders if finder.root.joinpath(*f).resolve() in links)
    return "/".join(same[0]) if same else None


def _ends(before: list[str], parts: list[str]) -> list[list[str]]:
    """Return a path of data.yaml without its first 0, 1, ... folders."""
    wanted = [*before, *parts]
    return [wanted[start:] for start in range(len(wanted) + (not parts))]


def _with_renamed(written: list[list[str]], split: str | None) -> Iterator[list[str]]:
    """Yield paths of a split, and then with other usual names for the folder of the split."""
    for end in itertools.chain(written, *(_renamed(end, split) for end in written)):
        if split is None or split_of("/".join(end)) == split:
            yield end


def _renamed(parts: list[str], split: str | None) -> Iterator[list[str]]:
    """Yield a path with other usual names for the folder of its split."""
    for n, part in enumerate(parts):
        if split is not None and SPLIT_WORDS.get(part.lower()) == split:
            for word in (word for word, other in SPLIT_WORDS.items() if other == split):
                yield [*parts[:n], word, *parts[n + 1 :]]


def named_folders(path: Path) -> list[Path] | None:
    """Return the folders of splits that data.yaml names; None if others may be read as well."""
    root = dataset_folder(path)
    _, content = _read_yaml(root, path if path.is_file() else None) or (path, {})
    base, entries = content.get("path"), [*_entries(content)]
    before = parts_of(base) if isinstance(base, str) else []
    ends = [e for _, text in entries for e in _ends(before, parts_of(nfc(text)))]
    found = [end for end in ends if root.joinpath(*end).exists()]
    is_complete = "train" in dict(entries) and all(split_of("/".join(end)) for end in found)
    return [root.joinpath(*end) for end in found] if is_complete else None


def _listed_images(
    finder: ImageFinder, origin: Path, listed: Sequence[_Listed]
) -> dict[str, list[str]]:
    """Return the image files of each split; a missing image never gets that of another split."""
    splits: dict[tuple[str, str], set[str]] = {}
    for entry in listed:
        splits.setdefault((entry.folder, entry.name), set()).add(entry.split)
    wanted = [
        Wanted(name, folder, next(iter(words)) if len(words) == 1 else None)
        for (folder, name), words in splits.items()
    ]
    found = dict(zip(splits, finder.find(wanted, origin), strict=True))
    files: dict[str, list[str]] = {}
    absent: dict[Path, list[str]] = {}
    for split, path, folder, name in listed:
        if item := found[folder, name]:
            files.setdefault(split, []).append(item.file)
        else:
            absent.setdefault(path, []).append(name)
    for path, names in absent.items():
        refuse(path, "images that do not exist", names)
    return files


def _label_files(
    finder: ImageFinder, texts: list[PurePosixPath], notes: list[str]
) -> tuple[dict[str, PurePosixPath], set[PurePosixPath]]:
    """Return the label file of each image that has one, and all label files of images."""
    several: dict[str, list[PurePosixPath]] = {}
    found = finder.find(finder.of_label_files(texts), finder.root, may_share=True)
    for text, item in zip(texts, found, strict=True):
        if item:
            several.setdefault(item.file, []).append(text)
    copies, different = list[PurePosixPath](), list[str]()
    for image, files in several.items():
        if len(files) > 1:  # one may describe the image in words
            paths = {file: finder.root / file for file in files}
            labels = [f for f, path in paths.items() if has_boxes(path) or not path.stat().st_size]
            labels = labels or files
            contents = {paths[file].read_bytes() for file in labels}
            different += [f"{' and '.join(map(str, labels))} ({image})"] * (len(contents) > 1)
            copies += [file for file in files if file != labels[0]]
            several[image] = labels
    refuse(finder.root, "different label files of one image", different, "keep one of them")
    note_copies(copies, notes)
    used = {text for text, item in zip(texts, found, strict=True) if item}
    return {image: files[0] for image, files in several.items()}, used


def _with_unnamed(
    finder: ImageFinder,
    labels: Mapping[str, PurePosixPath],
    named: Mapping[str, list[str]],
    notes: list[str],
) -> dict[str, list[str]]:
    """Return the images of each split: the named ones, else those of folders that have labels."""
    folders = {file.rpartition("/")[0] for file in labels}
    assigned = set(itertools.chain(*named.values()))
    rest = [file for file in sorted(finder.files) if file not in assigned]
    files = [file for file in rest if file.rpartition("/")[0] in folders]
    if others := len(rest) - len(files):
        other = next(file for file in rest if file.rpartition("/")[0] not in folders)
        notes.append(f"images of folders without labels, left out: {others:,}, such as {other}")
    words = [split_of(file.rpartition("/")[0]) for file in files]
    splits = words if named.get("train") else place(words, files, notes)
    by_split = dict(named)
    for file, split in zip(files, splits, strict=True):
        if split is not None and not named.get(split):
            by_split[split] = [*by_split.get(split, ()), file]
    return {split: files for split, files in by_split.items() if files}


def _read_split(
    root: Path,
    files: list[str],
    labels: Mapping[str, PurePosixPath],
    names: list[str],
    notes: list[str],
    keypoints: bool,
) -> list[LabeledImage]:
    repeated = Counter[str]()

    def read_image(file: str) -> LabeledImage:
        width, height = size_or_none(root / file, upright=True)
        has_labels = file in labels
        lines = _boxes(root / labels[file], names, keypoints) if width and has_labels else []
        boxes = dict.fromkeys(in_pixels(box, width, height) for box in lines)
        repeated[file] = len(lines) - len(boxes)
        return LabeledImage(file, width, height, list(boxes), has_labels)

    images = in_threads(read_image, files)
    if count := repeated.total():
        file = next(file for file in files if repeated[file])
        notes.append(f"lines with a box that another has, left out: {count:,}, such as of {file}")
    return images


def _without_image(
    texts: list[PurePosixPath],
    used: Collection[PurePosixPath],
    finder: ImageFinder,
    all_images: ImageFinder,
    notes: list[str],
) -> list[PurePosixPath]:
    """Return the label files without an image, for example because of its format.

    If data.yaml leaves the image out, the label file is noted instead.

    Args:
        finder: The images that data.yaml does not leave out.
    """
    folders = {text.parent for text in used}
    image_folders = {file.rpartition("/")[0] for file in finder.files}
    without, unnamed = list[PurePosixPath](), list[str]()
    for text in texts:
        others = [f for f in all_images.with_stem(text.stem) if f not in finder.files]
        if text in used or not image_folders.isdisjoint(f.rpartition("/")[0] for f in others):
            continue  # `prepare` notes the other images of these folders
        if not others or text.parent in folders:
            without.append(text)
        elif has_boxes(finder.root / text):
            unnamed += others[:1]
    if unnamed:
        count = f"{len(unnamed):,}, such as {min(unnamed)}"
        notes.append(f"labeled images in folders that no split names, left out: {count}")
    return without


def _no_labels(
    root: Path, images: list[str], texts: list[PurePosixPath], labels: Mapping[str, PurePosixPath]
) -> DataError:
    if not images:
        return DataError(f"{root}: no images to train on in any folder")
    if labels:
        first = min(labels.values())
        problem = f"{root}: no object is labeled: all label files are empty, such as {first}"
        return DataError(problem, hint="label the images, and export again")
    found = [str(text) for text in texts if has_boxes(root / text)] or ["none"]
    return DataError(
        f"{root}: none of {len(images):,} images, such as {min(images)}, has a label file of its "
        f"name; label files: {listed(found, MAX_NAMED)}",
        hint="a label file has the name of its image, as in labels/a.txt for images/a.jpg",
    )


def _boxes(path: Path, names: list[str], keypoints: bool) -> list[LabeledBox]:
    """Return the boxes of a label file, in fractions of the image."""
    boxes = []
    for location, line in read_lines(path, MAX_LABEL_BYTES):
        try:
            index, *numbers = (float(word) for word in line.split())
            label = int(index)
        except (ValueError, OverflowError):
            problem = f"{line[:60]!r}: expected a class number and fractions"
            raise DataError(f"{location}: {problem}") from None
        if index != label or not 0 <= label < len(names):
            known = counted(len(names), "name")
            raise DataError(f"{location}: class {index:g}, but there are {known}, from 0")
        left, top, right, bottom = _edges(numbers[:4] if keypoints else numbers, location)
        boxes.append(LabeledBox(names[label], left, top, right - left, bottom - top))
    return boxes


def _are_fractions(numbers: list[float]) -> bool:
    return all(-SLACK <= number <= 1 + SLACK for number in numbers)


def _edges(numbers: list[float], location: str) -> tuple[float, float, float, float]:
    """Return left, top, right and bottom of a box or a polygon."""
    if not _are_fractions(numbers):
        raise DataError(
            f"{location}: the numbers are not fractions of the image's width and height",
            hint="this format uses fractions from 0 to 1, not pixels",
        )
    if len(numbers) == 4:
        x, y, width, height = numbers
        return x - width / 2, y - height / 2, x + width / 2, y + height / 2
    if len(numbers) >= 6 and len(numbers) % 2 == 0:
        xs, ys = numbers[::2], numbers[1::2]
        return min(xs), min(ys), max(xs), max(ys)
    raise DataError(
        f"{location}: {len(numbers)} numbers after the class: 4 are a box, 6 or more (an even "
        "number) are a polygon"
    )
