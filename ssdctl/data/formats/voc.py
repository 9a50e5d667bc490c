"""Read Pascal VOC's format: an XML file per image, lists of images in ImageSets.

A folder of XML files belongs to the folder below `root` that has most of its images, whatever their
names are. There may be several: a folder per split, or a VOCdevkit with VOC2007 and VOC2012.
Boxes count pixels from 1 and include the last ones: left = xmin - 1, right = xmax. If an xmin or
ymin of the dataset is below 1, they count from 0: left = xmin. Objects marked `difficult` become
crowds: trained on, and neither hit nor miss when scored, as in the SSD paper.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree

from ssdctl.data.annotations import (
    SPLIT_WORDS,
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    refuse,
    split_of,
)
from ssdctl.data.formats._parse import (
    in_threads,
    numbers,
    read_lines,
    read_xml,
    root_element,
    whole_number,
)
from ssdctl.data.image_check import header_size
from ssdctl.data.image_files import files_below, is_image
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name

LOOKED_FOR = ("Annotations/*.xml",)
LISTS = {**SPLIT_WORDS, "trainval": "trainval", "default": "default"}  # CVAT's without a subset
MAX_LIST_BYTES = 1 << 28
MAX_DEPTH = 4  # folders above the first XML file, as in data/VOCdevkit/VOC2012/Annotations


class _Files(NamedTuple):
    """The files below a dataset folder. Paths are relative to it, the folder "" is itself."""

    root: Path
    xml: dict[str, list[str]]  # stems by folder
    images: dict[str, list[str]]  # paths by path without suffix
    folders: dict[str, list[str]]  # image folders by stem


class _Xml(NamedTuple):
    """An XML file, and the split that its list or its folder gives."""

    folder: str
    stem: str
    split: str | None
    is_listed: bool

    @property
    def path(self) -> str:
        return _join(self.folder, f"{self.stem}.xml")


def recognise(path: Path) -> Path | None:
    seen = set()
    for name in files_below(path, MAX_DEPTH) if path.is_dir() else ():
        folder, _, file = name.rpartition("/")
        if file.endswith(".xml") and not file.startswith("._") and folder not in seen:
            seen.add(folder)
            if root_element(path / name) == "annotation":
                return path / folder
    return None


def read(path: Path) -> dict[str, Annotations]:
    """Return the splits of a folder, in the order of their lists; classes are sorted by name.

    Without lists, the name of the folder of XML files or of images is the split, else all images
    are for training.
    """
    root, files, notes = path, _find_files(path), list[str]()
    if not files.xml:
        raise DataError(
            f"{root}: not Pascal VOC's format: no folder of XML files (Annotations)",
            hint="give the folder that holds XML files and images, as in --data VOCdevkit/VOC2012",
        )
    xmls = _xml_files(files)
    contents = _from_one(xmls, in_threads(lambda xml: _read(root / xml.path), xmls), notes)
    places = {folder: _image_folder(files, folder) for folder in {xml.folder for xml in xmls}}
    splits: dict[str, list[LabeledImage]] = {}
    used: dict[str, _Xml] = {}  # by image
    absent, repeated = [], []
    for xml, content in zip(xmls, contents, strict=True):
        image = _image_of(files, places[xml.folder], xml, content.file_name)
        if image is None:
            absent.append(xml.path)
        elif used.setdefault(image, xml).folder != xml.folder and not xml.is_listed:
            repeated.append(xml.path)  # a copy of the labels in another folder
        else:
            split = xml.split or split_of(image.rpartition("/")[0]) or "train"
            width, height = content.width, content.height
            if width <= 0 or height <= 0:  # some tools write no size
                width, height = header_size(root / image)
            splits.setdefault(split, []).append(LabeledImage(image, width, height, content.boxes))
    if len(absent) == len(xmls):
        raise DataError(
            f"no image for {len(xmls):,} XML files was found below {root}",
            hint="copy the images there: an image has the name of its XML file",
        )
    refuse(root, "images of annotations are missing", absent)
    if repeated:
        first = f"are left out, among them {repeated[0]}"
        notes.append(f"{len(repeated):,} XML files of images that have another one {first}")
    searched = {places[xml.folder] for xml in xmls if not xml.is_listed}
    notes += _unlabeled(files, searched, {_without_suffix(image) for image in used})
    return from_images(splits, None, root, root, notes)


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _without_suffix(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


def _find_files(root: Path) -> _Files:
    files = _Files(root, {}, {}, {})
    for name in sorted(files_below(root), key=lambda n: (n.count("/"), n)):
        folder, _, stem = _without_suffix(name).rpartition("/")
        if is_image(path := PurePosixPath(name)):
            files.images.setdefault(_join(folder, stem), []).append(name)
            files.folders.setdefault(stem, []).append(folder)
        elif path.suffix == ".xml" and not stem.startswith("._"):  # metadata from macOS
            files.xml.setdefault(folder, []).append(stem)
    for folder, stems in list(files.xml.items()):
        if root_element(root / folder / f"{stems[0]}.xml") not in ("annotation", ""):
            del files.xml[folder]  # CVAT's, or of another program
    return files


def _xml_files(files: _Files) -> list[_Xml]:
    """Return the XML files that ImageSets lists, and those of all folders without lists."""
    xmls: list[_Xml] = []
    rest = list(files.xml)
    parts = [folder.split("/") if folder else [] for folder in files.xml]
    bases = {"/".join(p[:depth]) for p in parts for depth in range(len(p) + 1)}
    for base in sorted(base for base in bases if (files.root / base / "ImageSets").is_dir()):
        below = [folder for folder in files.xml if f"{folder}/".startswith(base and f"{base}/")]
        tops = {
            base if f == base else _join(base, f[len(base) :].strip("/").split("/")[0])
            for f in below
        }
        top = min(tops, key=lambda t: (not t.endswith("Annotations"), t))
        splits = _splits(files.root / base / "ImageSets", files.root / top)
        if splits:
            rest = [folder for folder in rest if folder not in below]
        for split, stems in splits.items():
            for folder, stem in (_join(top, s).rpartition("/")[::2] for s in stems):
                xmls.append(_Xml(folder, stem, split, True))
    for folder in rest:
        named = split_of(folder)
        xmls += [_Xml(folder, stem, named, False) for stem in sorted(files.xml[folder])]
    return xmls


def _splits(lists: Path, annotations: Path) -> dict[str, list[str]]:
    """Return the stems of each split's XML files below a folder; none if there are no lists."""
    if (lists / "Main").is_dir():
        lists /= "Main"
    named = {LISTS.get(path.stem.lower()): path for path in sorted(lists.glob("*.txt"))}
    stems = {n: _stems(path, annotations) for n, path in named.items() if n is not None}
    if not {"train", "trainval", "default"} & set(stems):
        return {}
    splits = {"train": stems.get("train") or stems.get("trainval", [])}
    splits["train"] += stems.get("default", [])
    if "train" in stems and "val" in stems:
        splits["val"] = stems["val"]
    if stems.get("test") and (annotations / f"{stems['test'][0]}.xml").is_file():
        splits["test"] = stems["test"]  # VOC2012's test list is public, its XML files are not
    return splits


def _stems(path: Path, annotations: Path) -> list[str]:
    """Return the name in each line: lists of one class have a flag after it."""
    words = []
    for line in map(str.strip, read_lines(path, MAX_LIST_BYTES)):
        if not line or line.startswith("#"):
            continue
        if line.startswith('"'):  # old versions of CVAT put names with spaces in quotes
            words.append(line.split('"')[1])
        elif " " in line and is_plain_name(line) and (annotations / f"{line}.xml").is_file():
            words.append(line)
        else:
            words.append(line.split()[0])
    stems = list(dict.fromkeys(words))
    refuse(path, "not plain names", [stem for stem in stems if not is_plain_name(stem)])
    return stems


def _image_folder(files: _Files, folder: str) -> str | None:
    """Return the folder that has most images of a folder of XML files; None if none has any.

    A folder of the same split is preferred if it has half of them, because images of other splits
    may have the same names.
    """
    stems = files.xml.get(folder, [])
    if all(_join(folder, stem) in files.images for stem in stems):
        return folder
    counts = Counter(place for stem in stems for place in set(files.folders.get(stem, ())))
    split, words = split_of(folder), set(folder.split("/"))

    def rank(place: str) -> tuple[bool, int, bool, int]:
        same_split = split is not None and split_of(place) == split
        likely = same_split and 2 * counts[place] >= len(stems)
        return likely, counts[place], same_split, len(words.intersection(place.split("/")))

    return max(sorted(counts), key=rank, default=None)


def _image_of(files: _Files, folder: str | None, xml: _Xml, named: str) -> str | None:
    """Return the image of an XML file: the one with its stem, else the one that it names.

    Of several with its stem, it is the one with the suffix of the name. Outside of `folder`, it
    must be the only one, and not of another split.
    """
    suffix = PurePosixPath(named).suffix
    for stem in (xml.stem, PurePosixPath(named).stem):
        place = folder
        if place is None or _join(place, stem) not in files.images:
            places = files.folders.get(stem, [])
            split = split_of(places[0]) if places else None
            if len(places) != 1 or (xml.split and split not in (None, xml.split)):
                continue
            place = places[0]
        images = files.images[_join(place, stem)]
        return next((image for image in images if suffix and image.endswith(suffix)), images[0])
    return None


def _unlabeled(files: _Files, folders: set[str | None], labeled: set[str]) -> list[str]:
    """Return a note for each of the folders that has images without an XML file."""
    unlabeled: dict[str, list[str]] = {}
    for path, images in files.images.items():
        folder = path.rpartition("/")[0]
        if folder in folders and path not in labeled:
            unlabeled.setdefault(folder, []).extend(images)
    return [
        f"{folder or '.'}: {len(images):,} images have no XML file and are left out, among them "
        f"{PurePosixPath(min(images)).name}"
        for folder, images in sorted(unlabeled.items())
    ]


def _read(path: Path) -> LabeledImage:
    """Return the content of an XML file; a width and height of 0 are not given."""
    tree = read_xml(path)
    width, height = (
        whole_number(tree.findtext(f"size/{side}", "").strip() or "0", f"{path}: size/{side}")
        for side in ("width", "height")
    )
    boxes = [_box(item, path, n) for n, item in enumerate(tree.findall("object"), 1)]
    named = tree.findtext("filename", "").strip().replace("\\", "/")
    return LabeledImage(named.rpartition("/")[2], width, height, boxes)


def _box(item: ElementTree.Element, path: Path, number: int) -> LabeledBox:
    if item.find("polygon/pt") is not None and item.find("bndbox") is None:
        raise DataError(
            f"{path}: in the format of LabelMe (MIT), which is not read: its objects are polygons",
            hint="import it into CVAT (LabelMe 3.0) and export Pascal VOC or COCO",
        )
    name = item.findtext("name", "").strip()
    if not name:
        raise DataError(f"{path}: object {number} has no name")
    try:
        left, top, right, bottom = numbers(
            [item.findtext(f"bndbox/{side}", "") for side in ("xmin", "ymin", "xmax", "ymax")]
        )
        is_crowd = int(item.findtext("difficult", "0").strip() or 0) == 1
    except ValueError:
        raise DataError(
            f"{path}: object {number} ({name}) lacks a bndbox of four numbers"
        ) from None
    return LabeledBox(name, left, top, right - left, bottom - top, is_crowd)


def _from_one(
    xmls: list[_Xml], contents: list[LabeledImage], notes: list[str]
) -> list[LabeledImage]:
    """Move boxes that count pixels from 1, unless one shows that they count from 0."""
    for xml, content in zip(xmls, contents, strict=True):
        if any(min(box.left, box.top) < 1 for box in content.boxes):
            notes.append(f"boxes count pixels from 0, not from 1 as Pascal VOC's do: {xml.path}")
            return contents

    def moved(box: LabeledBox) -> LabeledBox:
        left, top = box.left - 1, box.top - 1
        return LabeledBox(box.name, left, top, box.width + 1, box.height + 1, box.is_crowd)

    return [content._replace(boxes=list(map(moved, content.boxes))) for content in contents]
