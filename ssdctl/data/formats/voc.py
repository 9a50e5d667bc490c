"""Read Pascal VOC's format: an XML file per image, lists of images in ImageSets.

The image of an XML file has its stem, in a folder of any name (find_images.py). There may be
several folders: one per split, or a VOCdevkit with VOC2007 and VOC2012.
Boxes count pixels from 1 and include the last ones: left = xmin - 1, right = xmax. If an xmin or
ymin of the dataset is below 1, they count from 0: left = xmin. Objects marked `difficult` become
crowds: trained on, and neither hit nor miss when scored, as in the SSD paper.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree

from ssdctl.data.annotations import (
    SPLIT_WORDS,
    Annotations,
    LabeledBox,
    LabeledImage,
    from_images,
    nfc,
    place,
    refuse,
    split_of,
    without_copies,
)
from ssdctl.data.find_images import WHICH, ImageFinder, Wanted, stem_of
from ssdctl.data.formats import (
    ROTATED,
    numbers,
    read_lines,
    read_xml,
    root_element,
    turned,
    whole_number,
)
from ssdctl.data.image_files import (
    files_below,
    in_threads,
    is_image,
)
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name
from ssdctl.runtime.safe_text import counted, quoted_folder

LOOKED_FOR = ("Annotations/*.xml",)
LISTS = {**SPLIT_WORDS, "trainval": "trainval", "default": "default"}  # CVAT's without a subset
MAX_LIST_BYTES = 1 << 28
STANDARD = ("JPEGImages", "images", "")  # folders of images; "": the dataset folder
MAX_FILES = 300_000  # of the folder above, for a hint
FROM_ZERO = "if they count from 0, export in COCO's format instead"
MAX_TRIED = 9  # XML files of a folder
MAX_DEPTH = 4  # folders above the first XML file, as in data/VOCdevkit/VOC2012/Annotations


class _Xml(NamedTuple):
    """An XML file below the dataset folder, and the split that its list or its folder gives."""

    path: PurePosixPath
    top: PurePosixPath | None  # Annotations; None: no list names it
    name: str  # of a list, relative to that
    exists: bool = True
    split: str | None = None


class _Content(NamedTuple):
    folder: str  # that it names
    image: LabeledImage  # file_name is the base name that it names
    num_turned: int = 0  # boxes


_Xmls = dict[PurePosixPath, list[PurePosixPath]]  # paths by folder


def recognize(path: Path) -> Path | None:
    seen = Counter[str]()
    for name in files_below(path, MAX_DEPTH) if path.is_dir() else ():
        folder, _, file = name.rpartition("/")
        if file.lower().endswith(".xml") and seen[folder] < MAX_TRIED:
            seen[folder] += 1
            if root_element(path / name) == "annotation":
                return path / folder
    return None


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, in the order of their lists; classes are sorted by name.

    Without lists, the name of the folder of XML files or of images is the split, else all images
    are for training.
    """
    files, notes = sorted(files_below(path), key=lambda name: (name.count("/"), name)), list[str]()
    by_folder = _find_xmls(path, files, notes)
    if not by_folder:
        raise DataError(
            f"{path}: not Pascal VOC's format: no folder of XML files (Annotations)",
            hint="give the folder that holds XML files and images, as in --data VOCdevkit/VOC2012",
        )
    finder = ImageFinder(path, STANDARD, image_dir, files=files)
    xmls = _xml_files(path, by_folder, finder, notes)
    contents = _from_one(xmls, in_threads(lambda xml: _read(path, xml), xmls), notes)
    if num_turned := sum(content.num_turned for content in contents):
        notes.append(f"{ROTATED}: {num_turned:,}")
    found = _find_images(finder, xmls, contents)
    _refuse_missing(path, xmls, found)
    images = [
        content.image._replace(file_name=image)
        for content, image in zip(contents, found, strict=True)
        if image is not None  # refused above
    ]
    words = [
        xml.split or split_of(image.file_name.rpartition("/")[0])
        for xml, image in zip(xmls, images, strict=True)
    ]
    rows = without_copies(path, [xml.path for xml in xmls], words, images, notes)
    placed = place([words[row] for row in rows], [images[row].file_name for row in rows], notes)
    splits: dict[str, list[LabeledImage]] = {}
    for row, split in zip(rows, placed, strict=True):
        if split is not None:
            splits.setdefault(split, []).append(images[row])
    return from_images(splits, None, path, path, notes)


def _refuse_missing(root: Path, xmls: list[_Xml], found: list[str | None]) -> None:
    absent = [xml.path for xml, image in zip(xmls, found, strict=True) if image is None]
    if len(absent) == len(xmls):
        raise DataError(
            f"no image for {counted(len(xmls), 'XML file')} was found below {root}",
            hint=_images_above(root, xmls[0])
            or "copy the images there: an image has the name of its XML file",
        )
    refuse(root, "images of annotations are missing", absent)


def _find_xmls(root: Path, files: list[str], notes: list[str]) -> _Xmls:
    """Return the XML files of the format; others beside them, as of GDAL, are noted."""
    paths = [path for path in map(PurePosixPath, files) if path.suffix.lower() == ".xml"]
    names = in_threads(lambda path: root_element(root / path), paths)
    xmls: _Xmls = {}
    for path, name in zip(paths, names, strict=True):
        if name in ("annotation", ""):  # "": not XML, an error when it is read
            xmls.setdefault(path.parent, []).append(path)
    others = [
        path
        for path, name in zip(paths, names, strict=True)
        if path.parent in xmls and name not in ("annotation", "")
    ]
    if others:
        text = "XML files that are no annotations, left out"
        notes.append(f"{text}: {len(others):,}, such as {others[0]}")
    return xmls


def _xml_files(root: Path, by_folder: _Xmls, finder: ImageFinder, notes: list[str]) -> list[_Xml]:
    """Return the XML files that ImageSets lists, and those of all folders without lists.

    An image of a list without an XML file has no objects.
    """
    xmls: list[_Xml] = []
    rest = list(by_folder)
    bases = {base for folder in by_folder for base in (folder, *folder.parents)}
    for base in sorted(base for base in bases if (root / base / "ImageSets").is_dir()):
        below = [folder for folder in by_folder if folder.is_relative_to(base)]
        listable = _Listable(base, [path for folder in below for path in by_folder[folder]], finder)
        splits = _splits(root / base / "ImageSets", listable, finder, notes)
        if splits:
            rest = [folder for folder in rest if folder not in below]
        listed = {name for names in splits.values() for name in names}
        found = listable.find(listed, notes)
        for split, names in splits.items():
            xmls += [found[name]._replace(split=split) for name in names]
    if empty := [xml for xml in xmls if not xml.exists]:
        number = f"{len(empty):,}, such as {empty[0].name}"
        notes.append(
            f"images of the lists without an XML file, read as images without objects: {number}"
        )
    for folder in rest:
        word = split_of(folder.as_posix())
        xmls += [_Xml(path, None, "", split=word) for path in sorted(by_folder[folder])]
    return xmls


class _Listable:
    """The XML files below Annotations, which the lists of a folder name without suffix."""

    def __init__(self, base: PurePosixPath, paths: list[PurePosixPath], finder: ImageFinder):
        tops = {base.joinpath(*path.parent.relative_to(base).parts[:1]) for path in paths}
        self._base = base
        self.top = min(tops, key=lambda top: (not top.name.endswith("Annotations"), top))
        self._lead = (*STANDARD[:-1], self.top.name)  # folders that a name may begin with
        self._finder = finder
        below = [path for path in paths if path.is_relative_to(self.top)]
        self._by_name = {_name(path.relative_to(self.top)): path for path in below}
        self._by_stem: dict[str, list[str]] = {}  # names in folders
        for name in self._by_name:
            if "/" in name:
                self._by_stem.setdefault(_base(name), []).append(name)

    def __contains__(self, name: str) -> bool:
        return self._own(name) in self._by_name

    def find(self, names: set[str], notes: list[str]) -> dict[str, _Xml]:
        """Return the XML file of each name: of that path, else the only one of this stem."""
        found = {name: self._own(name) for name in names if name in self}
        taken, below, ambiguous = {*found.values()}, dict[str, str](), list[str]()
        for name in sorted(names.difference(found, (n for n in names if "/" in n))):
            images = [_name(PurePosixPath(path)) for path in self._finder.with_stem(name)]
            free = (other for other in self._by_stem.get(name, ()) if other not in taken)
            files = [other for other in free if not _has_other_image(other, images)]
            if len(files) == 1:
                found[name] = below[name] = files[0]
            elif files:
                ambiguous.append(f"{name} ({' or '.join(files)}?)")
        hint = "write the path below Annotations into the list, without suffix"
        refuse(self._finder.root, "names of lists that fit several files", ambiguous, hint)
        if below:
            first = next(iter(below.values()))
            notes.append(
                f"names of lists found in folders of XML files: {len(below):,}, as {first}"
            )
        xmls = {name: _Xml(self.top / f"{name}.xml", self.top, name, False) for name in names}
        for name, other in found.items():
            own = other if name in self else name
            xmls[name] = _Xml(self._by_name[other], self.top, own)
        means = self._images_of(names)
        return {name: xml._replace(name=means.get(name, xml.name)) for name, xml in xmls.items()}

    @cached_property
    def _images(self) -> set[str]:
        """The paths of images in usual folders beside the lists, without suffix."""
        below = (f"{self._base / folder}/" for folder in STANDARD if folder)
        lead, start = tuple(map(nfc, below)), len(nfc(f"{self._base / 'x'}")) - 1
        names = (name for name in map(nfc, self._finder.files) if name.startswith(lead))
        return {name[start : name.rindex("/") + 1] + stem_of(_base(name)) for name in names}

    def _images_of(self, names: set[str]) -> dict[str, str]:
        """Return the paths of these images that names mean: in the folder that has most of them."""
        means: dict[str, str] = {}
        own = {name: [f"{f}/{self._own(name)}" for f in STANDARD if f] for name in names}
        found = {name: [path for path in own[name] if path in self._images] for name in names}
        counts = Counter(path.partition("/")[0] for paths in found.values() for path in paths)
        for name, paths in found.items():
            by_count = {counts[path.partition("/")[0]]: path for path in paths}
            if name in self._images:
                means[name] = name
            elif by_count and len(by_count) == len(paths):
                means[name] = by_count[max(by_count)]
        return means

    def is_both(self, image: str, xml: str) -> bool:
        """Return whether a line names an image and its XML file."""
        return image in self._images and xml in self and self._own(image) == self._own(xml)

    def _own(self, name: str) -> str:
        """Return the path below Annotations, also of one that begins with JPEGImages."""
        folder, _, below = name.partition("/")
        return below if name not in self._by_name and folder in self._lead else name


def _has_other_image(name: str, images: list[str]) -> bool:
    """Return whether an XML file in a folder is that of an image in a folder of this name."""
    is_own = [f"/{image}".endswith(f"/{name}") for image in images]
    return any(is_own) and not all(is_own)


def _name(path: PurePosixPath) -> str:
    return nfc(path.with_suffix("").as_posix())


def _splits(
    lists: Path, listable: _Listable, finder: ImageFinder, notes: list[str]
) -> dict[str, list[str]]:
    """Return the names of each split's images; none if there are no lists."""
    if (lists / "Main").is_dir():
        lists /= "Main"
    stems: dict[str, list[str]] = {}
    for path in sorted(lists.glob("*.txt")):
        if word := LISTS.get(path.stem.lower()):
            listed = [*stems.get(word, ()), *_stems(path, listable, finder)]
            stems[word] = list(dict.fromkeys(listed))
    if {"train", "trainval", "default"}.isdisjoint(stems):
        refuse(
            lists,
            "no list of training images (train.txt or trainval.txt), only",
            sorted(path.relative_to(lists) for path in lists.rglob("*.txt")),
            "give the lists these names, or move them away to train on all images",
        )
        return {}
    train = stems.get("train") or stems.get("trainval", [])
    splits = {"train": train + stems.get("default", [])}
    if "train" in stems and "val" in stems:
        splits["val"] = stems["val"]
    if any(name in listable for name in stems.get("test", [])):
        splits["test"] = stems["test"]  # VOC2012's test list is public, its XML files are not
    notes += [f"{lists}: the list of {split} is empty" for split in splits if not splits[split]]
    return splits


def _stems(path: Path, listable: _Listable, finder: ImageFinder) -> list[str]:
    """Return the name in each line: lists of one class have a flag, a number, after it.

    Names with the suffix of an image or an XML file, or with both files, are accepted.
    """

    def is_name(text: str) -> bool:
        return text in listable or bool(finder.with_stem(_base(text)))

    words = []
    for _, line in read_lines(path, MAX_LIST_BYTES):
        line = nfc(line.strip().replace("\\", "/"))
        word = re.sub(r"(\s+-?\d+)+$", "", line)
        image, xml = map(_stem, _pair(word))
        other = xml if xml in listable and not listable.is_both(image, xml) else image
        names = (line, word, other)
        if name := next(filter(is_name, names), ""):
            words.append(name)
        elif line.startswith('"'):  # old versions of CVAT put names with spaces in quotes
            words.append(line.split('"')[1])
        elif not line.startswith("#"):
            words.append(word)
    refuse(path, "not plain names", [word for word in words if not is_plain_name(word)])
    return words


def _pair(text: str) -> tuple[str, str]:
    """Return both paths of `JPEGImages/a.jpg Annotations/a.xml`; of other text twice the text."""
    gaps = (gap.span() for gap in re.finditer(r"\s+", text))
    pairs = ((text[:start], text[end:]) for start, end in gaps)
    same = (pair for pair in pairs if len({_base(_stem(path)) for path in pair}) == 1)
    return next(same, (text, text))


def _stem(path: str) -> str:
    return path[:-4] if path.lower().endswith(".xml") else stem_of(path)


def _base(path: str) -> str:
    return path.rpartition("/")[2]


def _find_images(
    finder: ImageFinder, xmls: list[_Xml], contents: list[_Content]
) -> list[str | None]:
    """Return the image of each XML file: the one with its stem, else the one that it names."""
    wanted, others = list[Wanted](), list[Wanted]()
    named = Counter(content.image.file_name for content in contents)
    stems = {nfc(xml.path.stem) for xml in xmls}
    by_file = iter(finder.of_label_files([xml.path for xml in xmls if xml.top is None]))
    for xml, (folder, image, _) in zip(xmls, contents, strict=True):
        name = PurePosixPath(image.file_name)
        entry = next(by_file) if xml.top is None else Wanted(xml.name, xml.top.as_posix())
        size = (image.width, image.height)
        entry = entry._replace(size=size, is_label_file=True, folder=folder)
        stem = stem_of(name.name)
        suffix = name.name.removeprefix(stem)
        wanted.append(entry._replace(suffix=suffix if stem == nfc(xml.path.stem) else ""))
        is_own = named[image.file_name] == 1 and stem not in stems
        others.append(entry._replace(name=stem if is_own else "", suffix=suffix))
    found = finder.find(wanted, finder.root, may_share=True)
    second = finder.find(others, finder.root, may_share=True)
    both = [
        f"{xml.path} ({item.file}, and {other.file} by the name in it)"
        for xml, item, other in zip(xmls, found, second, strict=True)
        if item and other and item.file != other.file
    ]
    refuse(finder.root, "XML files that fit several images", both, WHICH)
    pairs = (item or other for item, other in zip(found, second, strict=True))
    return [pair.file if pair else None for pair in pairs]


def _images_above(path: Path, xml: _Xml) -> str | None:
    """Return the hint to give the folder above, if it has the image of an XML file."""
    above = path.absolute().parent
    below = itertools.islice(files_below(above, 2, skips_unreadable=True), MAX_FILES)
    stems = map(PurePosixPath, below)
    if any(file.stem == xml.path.stem and is_image(file) for file in stems):
        named = quoted_folder(path.parent if path.name else above)
        return f"did you mean the folder above, --data {named}?"
    return None


def _read(root: Path, xml: _Xml) -> _Content:
    """Return the content of an XML file; a width and height of 0 are not given."""
    path = root / xml.path
    if not xml.exists:
        return _Content("", LabeledImage("", 0, 0, []))
    tree = read_xml(path)
    width, height = (
        max(0, whole_number(tree.findtext(f"size/{s}", "").strip() or "0", f"{path}: size/{s}"))
        for s in ("width", "height")
    )
    boxes = [_box(item, path, n) for n, item in enumerate(tree.findall("object"), 1)]
    folder, named = (
        nfc(tree.findtext(tag, "").strip()).replace("\\", "/").rstrip("/").rpartition("/")[2]
        for tag in ("folder", "filename")
    )
    num_turned = sum(map(bool, map(_degrees, tree.findall("object"))))
    return _Content(folder, LabeledImage(named, width, height, boxes), num_turned)


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
    except ValueError:
        raise DataError(
            f"{path}: object {number} ({name}) lacks a bndbox of four numbers"
        ) from None
    difficult = item.findtext("difficult", "").strip().lower() or "0"
    difficult = {"true": "1", "false": "0", "unspecified": "0"}.get(difficult, difficult)
    is_crowd = whole_number(difficult, f"{path}: object {number} ({name}): difficult") == 1
    box = left, top, right - left, bottom - top
    left, top, width, height = map(float, turned(box, _degrees(item)))
    return LabeledBox(name, left, top, width, height, is_crowd)


def _degrees(item: ElementTree.Element) -> float:
    """Return by how much CVAT's box is turned, as it writes among the attributes."""
    for attribute in item.findall("attributes/attribute"):
        if attribute.findtext("name") == "rotation":
            with contextlib.suppress(ValueError):
                return numbers([attribute.findtext("value", "")])[0] % 180
    return 0


def _from_one(xmls: list[_Xml], contents: list[_Content], notes: list[str]) -> list[_Content]:
    """Move boxes that count pixels from 1, unless one shows that they count from 0."""
    if not any(content.image.boxes for content in contents):
        return contents
    for xml, content in zip(xmls, contents, strict=True):
        if any(min(box.left, box.top) < 1 for box in content.image.boxes):
            notes.append(f"boxes count pixels from 0, not from 1 as Pascal VOC's do: {xml.path}")
            return contents

    def moved(box: LabeledBox) -> LabeledBox:
        left, top = box.left - 1, box.top - 1
        return LabeledBox(box.name, left, top, box.width + 1, box.height + 1, box.is_crowd)

    notes.append(f"boxes are read as Pascal VOC's, whose pixels count from 1; {FROM_ZERO}")
    return [
        content._replace(image=content.image._replace(boxes=list(map(moved, content.image.boxes))))
        for content in contents
    ]
