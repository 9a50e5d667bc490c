"""Recognise the layout of a dataset folder or file.

    layout = find_layout(Path("export"))    # layout.source == "coco", layout.splits

COCO files are used where they are; every other layout is converted (ssdctl/data/convert.py).
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

import msgspec

from ssdctl.data.formats.file_names import files_below, is_image
from ssdctl.data.formats.open_images import box_files
from ssdctl.data.formats.voc import first_xml
from ssdctl.data.formats.xml_reader import root_element
from ssdctl.data.formats.yolo import is_yolo, read_description
from ssdctl.data.split_files import SPLITS, SplitFiles, split_of
from ssdctl.errors import DataError
from ssdctl.files import open_regular

Source = Literal["coco", "voc", "yolo", "openimages", "cvat-xml"]
SOURCE_OF_SUFFIX: dict[str, Source] = {
    ".yaml": "yolo",
    ".yml": "yolo",
    ".csv": "openimages",
    ".json": "coco",
}
ANNOTATION_FOLDERS = ("annotations", "Annotations", "labels")
WRITTEN_BY_SSDCTL = "ssdctl_"
SAMPLE_BYTES, SAMPLE_NAMES = 1_000_000, 20
MAX_FOLDERS = 20  # that are searched for a dataset, for the hint of an error
MAX_FILES = 20_000  # that are searched for what else a folder has
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"}
CONVERT_LABELME = "convert labelme's files to Pascal VOC's layout with its labelme2voc.py"
FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
LOOKED_FOR = (
    "dataset.toml, annotations/*.json, train/_annotations.coco.json, result.json, data.yaml, "
    "classes.txt, Annotations/*.xml, annotations.xml, *-annotations-bbox.csv"
)


class Layout(NamedTuple):
    """A dataset in one layout.

    Attributes:
        source: Its format.
        root: The folder that contains images and annotations.
        file: The file by which it was recognised, relative to `root` in messages.
        splits: COCO's splits; empty for layouts that must be converted.
    """

    source: Source
    root: Path
    file: Path
    splits: dict[str, SplitFiles]

    def describe(self) -> str:
        """Return the layout and its file for a message, as in `yolo (data.yaml)`."""
        is_inside = self.file != self.root and self.file.is_relative_to(self.root)
        return f"{self.source} ({self.file.relative_to(self.root) if is_inside else self.file})"


def find_layout(path: Path, source: str | None = None) -> Layout:
    """Return the layout of a dataset folder, or of a file such as data.yaml or instances.json.

    Args:
        path: The folder or file.
        source: Its format; None recognises it.

    Raises:
        DataError: No dataset, or several.
    """
    if path.is_file():
        return _of_file(path, source)
    if source is not None:
        return _forced(path, source)
    own = coco_layout(path)
    if own:
        return Layout("coco", path, next(iter(own.values())).annotations, own)
    layouts = list(_candidates(path))
    if not layouts:
        found, hint = _found_instead(path)
        raise DataError(
            f"{path}: no dataset found{found} (looked for {LOOKED_FOR})",
            hint=_dataset_nearby(path) or hint,
        )
    if len(layouts) > 1:
        named = ", ".join(layout.describe() for layout in layouts)
        raise DataError(
            f"{path}: contains several datasets: {named}",
            hint=f"choose one: ssdctl prepare --data {path} --from {layouts[0].source}",
        )
    return layouts[0]


def datasets_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, of the first ones, that are datasets."""
    folders = sorted(p for p in folder.glob("[!.]*") if p.is_dir())[:MAX_FOLDERS]
    return [path for path in folders if _is_dataset(path)]


def _is_dataset(folder: Path) -> bool:
    with contextlib.suppress(DataError):
        is_described = (folder / "dataset.toml").is_file()
        return is_described or bool(coco_layout(folder)) or any(_candidates(folder))
    return False


def _dataset_nearby(path: Path) -> str | None:
    above = path.parent if path.name else path.resolve().parent
    if _is_dataset(above):
        return f"did you mean the folder above, --data {above}?"
    if found := datasets_in(path):
        return (
            f"a folder in it is a dataset: --data {found[0]}; or describe the dataset in a "
            "dataset.toml"
        )
    return None


def _found_instead(folder: Path) -> tuple[str, str]:
    """Return what a folder without a dataset has, for the message, and the hint."""
    files = sorted(Path(n) for n in itertools.islice(files_below(folder), MAX_FILES))
    stems = {file.stem for file in files if is_image(file)}
    jsons = [file for file in files if file.suffix == ".json"][:SAMPLE_NAMES]
    if labelme := [file for file in jsons if _is_labelme(folder / file)]:
        return f", but labelme's JSON files, such as {labelme[0]}", CONVERT_LABELME
    if labels := [file for file in files if file.suffix == ".txt" and file.stem in stems]:
        return (
            f", but YOLO's labels, such as {labels[0]}, without the names of the classes",
            f"write {folder / 'classes.txt'}: a name per line, in the order of the class numbers",
        )
    if archives := [file for file in files if file.suffix.lower() in ARCHIVES]:
        return f", but an archive, {archives[0]}", f"unpack {folder / archives[0]}"
    hint = (
        "give the folder that an export was unpacked to, or describe the dataset in a "
        "dataset.toml (docs/custom-dataset.md)"
    )
    if stems:
        return ", but images without labels", f"export the labels as well; {hint}"
    return "", hint


def _is_labelme(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return b'"shapes"' in file.read(SAMPLE_BYTES)
    except OSError:
        return False


def _candidates(root: Path) -> Iterator[Layout]:
    if splits := coco_splits(root):
        yield Layout("coco", root, next(iter(splits.values())).annotations, splits)
    if is_yolo(root):
        description = read_description(root)
        yield Layout("yolo", root, description.path if description else root / "classes.txt", {})
    if (folder := first_xml(root)) is not None:
        yield Layout("voc", root, folder, {})
    for file in cvat_files(root):
        yield Layout("cvat-xml", root, file, {})
    if files := box_files(root):
        yield Layout("openimages", root, files[0], {})


def _forced(root: Path, source: str) -> Layout:
    if source == "coco":
        splits = coco_layout(root) or coco_splits(root)
        if not splits:
            raise DataError(
                f"{root}: no annotation file in COCO's format (looked for *.json in it, in "
                f"{', '.join(ANNOTATION_FOLDERS[:2])} and in the folders of splits)"
            )
        return Layout("coco", root, next(iter(splits.values())).annotations, splits)
    if source == "cvat-xml":
        files = cvat_files(root)
        if not files:
            raise DataError(f"{root}: no XML file of CVAT (looked for annotations.xml)")
        if len(files) > 1:
            named = ", ".join(file.name for file in files)
            hint = "give one: --data FILE"
            raise DataError(f"{root}: several XML files of CVAT: {named}", hint=hint)
        return Layout("cvat-xml", root, files[0], {})
    assert source in ("voc", "yolo", "openimages")
    return Layout(cast(Source, source), root, root, {})  # its reader refuses other layouts


def _of_file(path: Path, source: str | None) -> Layout:
    """Return the layout of a dataset that the user named by its file."""
    suffix = path.suffix.lower()
    kind = SOURCE_OF_SUFFIX.get(suffix)
    if suffix == ".xml" and root_element(path) == "annotations":
        kind = "cvat-xml"
    if suffix in ARCHIVES:
        raise DataError(f"{path}: an archive", hint="unpack it and give the folder")
    if kind is None or source not in (None, kind):
        raise DataError(
            f"{path}: not a dataset file" + (f" of {source}" if source else ""),
            hint="give a folder, COCO's JSON, a data.yaml, CVAT's annotations.xml or Open "
            "Images' CSV file",
        )
    root = path.parent
    if root.name in ANNOTATION_FOLDERS:
        root = root.parent
    if kind != "coco":
        return Layout(kind, root, path, {})
    if not is_coco_file(path):
        hint = CONVERT_LABELME if _is_labelme(path) else None
        raise DataError(
            f"{path}: not in COCO's format: no images, annotations and categories", hint=hint
        )
    return Layout("coco", root, path, {"train": SplitFiles(image_folder(path, root), path)})


def coco_layout(root: Path) -> dict[str, SplitFiles]:
    """Return the splits that COCO's own layout has in `root`."""
    splits = {}
    for split in SPLITS:
        annotations = root / "annotations" / f"instances_{split}2017.json"
        if annotations.is_file():
            folders = root / f"{split}2017", root / "images" / f"{split}2017"
            images = next((folder for folder in folders if folder.is_dir()), folders[0])
            splits[split] = SplitFiles(images, annotations)
    return splits


def coco_splits(root: Path) -> dict[str, SplitFiles]:
    """Return the splits of a labelling tool's COCO export; empty if there is none.

    Raises:
        DataError: Several files for one split.
    """
    files = _coco_files(root)
    if not files:
        return {}
    by_split: dict[str, list[Path]] = {}
    for file in files:
        folder = file.parent.relative_to(root).name
        split = split_of(file.stem) or split_of(folder)
        by_split.setdefault(split or ("train" if len(files) == 1 else ""), []).append(file)
    several = next((paths for s, paths in by_split.items() if len(paths) > 1 or not s), None)
    if several is not None:
        named = ", ".join(str(file.relative_to(root)) for file in files)
        raise DataError(
            f"{root}: several annotation files, not one for each split: {named}",
            hint="give one: --data FILE, or name them in a dataset.toml "
            "([train] and [val], each with images and annotations)",
        )
    if "train" not in by_split and "val" not in by_split:
        return {}
    return {
        split: SplitFiles(image_folder(by_split[split][0], root, split), by_split[split][0])
        for split in SPLITS
        if split in by_split
    }


def _coco_files(root: Path) -> list[Path]:
    """Return the COCO files of a folder; those called instances_* only, if there are any."""
    places = [root, *(root / name for name in ANNOTATION_FOLDERS)]
    places += sorted(p for p in root.glob("*") if split_of(p.name) and p.is_dir())
    files = [
        file
        for place in places
        for file in (sorted(place.glob("*.json")) if place.is_dir() else ())
        if not file.name.startswith(WRITTEN_BY_SSDCTL) and is_coco_file(file)
    ]
    return [f for f in files if f.name.startswith("instances_")] or files


def is_coco_file(path: Path) -> bool:
    """Return whether a JSON file contains COCO's three tables, without parsing it."""
    try:
        with open_regular(path) as file:
            if not path.stat().st_size:
                return False
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                keys = (b'"images"', b'"annotations"', b'"categories"')
                return all(content.find(key) >= 0 for key in keys)
    except OSError:
        return False


def image_folder(annotations: Path, root: Path, split: str | None = None) -> Path:
    """Return the folder below `root` that the file names of an annotation file are relative to.

    It is the first of the usual folders in which the first names exist, else in which their base
    names exist anywhere below; else the first folder that exists.
    """
    folders = list(_image_folders(annotations, root, split))
    names = _sample_names(annotations)
    for folder in folders:
        if names and sum((folder / name).is_file() for name in names) * 2 > len(names):
            return folder
    base_names = {name.rpartition("/")[2] for name in names}
    for folder in folders:
        files = {path.rpartition("/")[2] for path in files_below(folder)}
        if base_names and len(base_names & files) * 2 > len(base_names):
            return folder
    return folders[0]


def _image_folders(annotations: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Return the usual places of images, the most specific first; the last one is `root`."""
    words = SPLIT_FOLDERS.get(split or "", ())
    subset = re.sub(r"^(instances|person_keypoints)_", "", annotations.stem)
    names = [f"images/{subset}", subset, *(f"images/{w}" for w in words), *words]
    if annotations.parent.name not in ANNOTATION_FOLDERS and annotations.parent != root:
        yield annotations.parent
    for name in dict.fromkeys([*names, "images", "JPEGImages", "img", "data", "photos"]):
        if (root / name).is_dir():
            yield root / name
    yield root


SPLIT_FOLDERS = {
    "train": ("train", "Train", "training", "train2017"),
    "val": ("val", "valid", "validation", "Val", "Validation", "val2017"),
    "test": ("test", "Test", "testing", "test2017"),
}


def _sample_names(annotations: Path) -> list[str]:
    """Return the first file names of an annotation file that stay in a folder, with slashes."""
    with open_regular(annotations) as file:
        head = file.read(SAMPLE_BYTES)
        matches = FILE_NAME.findall(head) or FILE_NAME.findall(head + file.read())
    names = []
    for match in matches[:SAMPLE_NAMES]:
        try:
            names.append(str(msgspec.json.decode(match)).replace("\\", "/"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return [name for name in names if name and "\0" not in name]


def cvat_files(root: Path) -> list[Path]:
    """Return CVAT's XML files in a folder."""
    return [path for path in sorted(root.glob("*.xml")) if root_element(path) == "annotations"]
