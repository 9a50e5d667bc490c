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
from ssdctl.data.formats import numbers, read_lines, read_xml, root_element, whole_number
from ssdctl.data.image_files import files_below, header_size, in_threads, is_image
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name
from ssdctl.runtime.safe_text import counted

LOOKED_FOR = ("Annotations/*.xml",)
LISTS = {**SPLIT_WORDS, "trainval": "trainval", "default": "default"}  # CVAT's without a subset
MAX_LIST_BYTES = 1 << 28
MAX_DEPTH = 4  # folders above the first XML file, as in data/VOCdevkit/VOC2012/Annotations


class _Files(NamedTuple):
    """The files below a dataset folder; all paths are relative to it."""

    root: Path
    xml: dict[PurePosixPath, list[str]]  # stems by folder
    images: dict[str, list[PurePosixPath]]  # by stem


class _Xml(NamedTuple):
    """An XML file, and the split that its list or its folder gives."""

    path: PurePosixPath
    split: str | None
    is_listed: bool


def recognize(path: Path) -> Path | None:
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
    files, notes = _find_files(path), list[str]()
    if not files.xml:
        raise DataError(
            f"{path}: not Pascal VOC's format: no folder of XML files (Annotations)",
            hint="give the folder that holds XML files and images, as in --data VOCdevkit/VOC2012",
        )
    xmls = _xml_files(files)
    contents = _from_one(xmls, in_threads(lambda xml: _read(path / xml.path), xmls), notes)
    folders = {folder: _image_folder(files, folder) for folder in {x.path.parent for x in xmls}}
    splits: dict[str, list[LabeledImage]] = {}
    used: dict[PurePosixPath, _Xml] = {}  # by image
    absent, repeated = [], []
    for xml, content in zip(xmls, contents, strict=True):
        image = _image_of(files, folders[xml.path.parent], xml, content.file_name)
        if image is None:
            absent.append(xml.path)
        elif used.setdefault(image, xml).path.parent != xml.path.parent and not xml.is_listed:
            repeated.append(xml.path)  # a copy of the labels in another folder
        else:
            split = xml.split or split_of(str(image.parent)) or "train"
            width, height = content.width, content.height
            if width <= 0 or height <= 0:  # some tools write no size
                width, height = header_size(path / image)
            labeled = LabeledImage(str(image), width, height, content.boxes)
            splits.setdefault(split, []).append(labeled)
    if len(absent) == len(xmls):
        raise DataError(
            f"no image for {counted(len(xmls), 'XML file')} was found below {path}",
            hint="copy the images there: an image has the name of its XML file",
        )
    refuse(path, "images of annotations are missing", absent)
    if repeated:
        number = f"{len(repeated):,}, such as {repeated[0]}"
        notes.append(f"XML files of images that have another one, left out: {number}")
    return from_images(splits, None, path, path, notes)


def _find_files(root: Path) -> _Files:
    files = _Files(root, {}, {})
    paths = map(PurePosixPath, files_below(root))
    for path in sorted(paths, key=lambda path: (len(path.parts), str(path))):
        if is_image(path):
            files.images.setdefault(path.stem, []).append(path)
        elif path.suffix == ".xml" and not path.name.startswith("._"):  # metadata from macOS
            files.xml.setdefault(path.parent, []).append(path.stem)
    for folder, stems in list(files.xml.items()):
        if root_element(root / folder / f"{stems[0]}.xml") not in ("annotation", ""):
            del files.xml[folder]  # CVAT's, or of another program
    return files


def _xml_files(files: _Files) -> list[_Xml]:
    """Return the XML files that ImageSets lists, and those of all folders without lists."""
    xmls: list[_Xml] = []
    rest = list(files.xml)
    bases = {base for folder in files.xml for base in (folder, *folder.parents)}
    for base in sorted(base for base in bases if (files.root / base / "ImageSets").is_dir()):
        below = [folder for folder in files.xml if folder.is_relative_to(base)]
        tops = {base.joinpath(*folder.relative_to(base).parts[:1]) for folder in below}
        top = min(tops, key=lambda top: (not top.name.endswith("Annotations"), top))
        splits = _splits(files.root / base / "ImageSets", files.root / top)
        if splits:
            rest = [folder for folder in rest if folder not in below]
        for split, stems in splits.items():
            xmls += [_Xml(top / f"{stem}.xml", split, True) for stem in stems]
    for folder in rest:
        split_named = split_of(str(folder))
        xmls += [_Xml(folder / f"{s}.xml", split_named, False) for s in sorted(files.xml[folder])]
    return xmls


def _splits(lists: Path, annotations: Path) -> dict[str, list[str]]:
    """Return the stems of each split's XML files below a folder; none if there are no lists."""
    if (lists / "Main").is_dir():
        lists /= "Main"
    named = {LISTS.get(path.stem.lower()): path for path in sorted(lists.glob("*.txt"))}
    stems = {n: _stems(path, annotations) for n, path in named.items() if n is not None}
    if not {"train", "trainval", "default"} & set(stems):
        return {}
    train = stems.get("train") or stems.get("trainval", [])
    splits = {"train": train + stems.get("default", [])}
    if "train" in stems and "val" in stems:
        splits["val"] = stems["val"]
    if stems.get("test") and (annotations / f"{stems['test'][0]}.xml").is_file():
        splits["test"] = stems["test"]  # VOC2012's test list is public, its XML files are not
    return splits


def _stems(path: Path, annotations: Path) -> list[str]:
    """Return the name in each line: lists of one class have a flag after it."""
    words = []
    for _, line in read_lines(path, MAX_LIST_BYTES):
        line = line.strip()
        if line.startswith("#"):
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


def _image_folder(files: _Files, folder: PurePosixPath) -> PurePosixPath | None:
    """Return the folder that has most images of a folder of XML files; None if none has any.

    A folder of the same split is preferred if it has half of them, because images of other splits
    may have the same names.
    """
    stems = files.xml.get(folder, [])
    counts = Counter(f for stem in stems for f in {i.parent for i in files.images.get(stem, ())})
    if counts[folder] == len(stems):
        return folder
    split = split_of(str(folder))

    def rank(other: PurePosixPath) -> tuple[bool, int, bool, int]:
        same_split = split is not None and split_of(str(other)) == split
        likely = same_split and 2 * counts[other] >= len(stems)
        return likely, counts[other], same_split, len({*folder.parts} & {*other.parts})

    return max(sorted(counts), key=rank, default=None)


def _image_of(
    files: _Files, folder: PurePosixPath | None, xml: _Xml, named: str
) -> PurePosixPath | None:
    """Return the image of an XML file: the one with its stem, else the one that it names.

    Of several with its stem, it is the one with the suffix of the name. Outside of `folder`, it
    must be the only one, and not of another split.
    """
    suffix = PurePosixPath(named).suffix
    for stem in filter(None, (xml.path.stem, PurePosixPath(named).stem)):
        everywhere = files.images.get(stem, [])
        images = [image for image in everywhere if image.parent == folder]
        if not images and len(everywhere) == 1:
            split = split_of(str(everywhere[0].parent))
            images = everywhere if not xml.split or split in (None, xml.split) else []
        if images:
            return next((image for image in images if suffix and image.suffix == suffix), images[0])
    return None


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
