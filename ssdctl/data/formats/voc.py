"""Read Pascal VOC's layout: an XML file per image, lists of images in ImageSets.

    splits = read_voc(root) -> {"train": [LabeledImage, ...], "val": [...]}

`root` is a VOC folder, or holds several (VOCdevkit with VOC2007 and VOC2012), which are joined.
Boxes count pixels from 1 and include the last ones: left = xmin - 1, right = xmax. Objects marked
`difficult` become crowds: trained on, and neither hit nor miss when scored, as in the SSD paper.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from xml.etree import ElementTree

from ssdctl.data.annotations import LabeledBox, LabeledImage
from ssdctl.data.formats.coco import refuse
from ssdctl.data.formats.file_names import IMAGE_SUFFIXES, files_below, is_image
from ssdctl.data.formats.xml_reader import is_cvat_xml, numbers, read_xml, whole_number
from ssdctl.data.image_check import header_size
from ssdctl.data.split_files import SPLIT_WORDS, split_of, usable_splits
from ssdctl.errors import DataError
from ssdctl.files import is_plain_name, read_errors, read_text

log = logging.getLogger(__name__)
ANNOTATIONS = ("Annotations", "annotations", "xmls", "xml", "labels")
IMAGES = ("JPEGImages", "images", "Images", "imgs", "img", "data")
SUFFIXES = [s for suffix in sorted(IMAGE_SUFFIXES) for s in (suffix, suffix.upper())]
LISTS = {**SPLIT_WORDS, "trainval": "trainval", "default": "default"}  # CVAT's without a subset
MAX_LIST_BYTES = 1 << 28
XML_THREADS = 8  # they wait for the file system


class _Folder(NamedTuple):
    """One VOC folder and its parts, all below the dataset folder."""

    root: Path  # the dataset folder
    base: Path
    annotations: Path
    images: Path

    def image_of(self, stem: str, named: str) -> Path | None:
        """Return the image of an XML file: the one with its stem, else the one that it names.

        Of several with its stem, it is the one with the suffix of the name.
        """
        suffixes = [PurePosixPath(named).suffix, *SUFFIXES]
        candidates = [self.images / (stem + suffix) for suffix in suffixes if suffix]
        if named and is_plain_name(named):
            candidates.append(self.images / named)
        return next((path for path in candidates if path.is_file()), None)


def read_voc(root: Path) -> dict[str, list[LabeledImage]]:
    """Return the images of each split, in the order of their lists.

    Without lists, folders called train, valid and test are the splits; else all images are for
    training. Without validation images, `test` validates.

    Raises:
        DataError: No VOC folder, a broken XML file, a listed image that does not exist.
    """
    folders = _folders(root)
    splits: dict[str, list[LabeledImage]] = {}
    for folder in folders:
        for split, stems in _splits(folder).items():
            with ThreadPoolExecutor(XML_THREADS) as pool:
                images = list(pool.map(lambda stem, f=folder: _read_image(f, stem), stems))
            absent = [f"{s}.xml" for s, image in zip(stems, images, strict=True) if image is None]
            refuse(folder.images, "images of annotations are missing", absent)
            splits.setdefault(split, []).extend(image for image in images if image is not None)
    return usable_splits(splits)


def _folders(root: Path) -> list[_Folder]:
    """Return `root` itself, or each VOC folder in it."""
    if folders := voc_folders(root):
        return folders
    raise DataError(
        f"{root}: not Pascal VOC's layout: no folder of XML files (Annotations) with one of images "
        "(JPEGImages)",
        hint="give the folder that holds both, as in --data VOCdevkit/VOC2012",
    )


def voc_folders(root: Path) -> list[_Folder]:
    """Return `root` itself, or each VOC folder in it; none if there is no VOC folder."""
    if (own := _folder(root, root)) is not None:
        return [own]
    bases = sorted(path for path in root.glob("*") if path.is_dir())
    return [f for base in bases if (f := _folder(root, base)) is not None]


def _folder(root: Path, base: Path) -> _Folder | None:
    """Return a VOC folder, by its usual names; XML files may also be in the image folder."""
    for name in (*ANNOTATIONS, *IMAGES, "."):
        annotations = base / name
        first = next(_xml_stems(base, annotations), None)
        if first is None or is_cvat_xml(annotations / f"{first}.xml"):
            continue
        images = next((base / n for n in IMAGES if (base / n).is_dir()), annotations)
        return _Folder(root, base, annotations, images)
    return None


def _splits(folder: _Folder) -> dict[str, list[str]]:
    """Return the stems of each split's images."""
    lists = folder.base / "ImageSets" / "Main"
    if not lists.is_dir():
        lists = folder.base / "ImageSets"
    named = {LISTS.get(path.stem.lower()): path for path in sorted(lists.glob("*.txt"))}
    stems = {n: _stems(path, folder.annotations) for n, path in named.items() if n is not None}
    if not {"train", "trainval", "default"} & set(stems):
        # Exports with a folder per split, and undivided sets.
        split = split_of(folder.base.name) if folder.base != folder.root else None
        listed = sorted(_xml_stems(folder.base, folder.annotations))
        _report_unlabelled(folder, set(listed))
        return {split or "train": listed}
    splits = {"train": stems.get("train") or stems.get("trainval", [])}
    splits["train"] += stems.get("default", [])
    if "train" in stems and "val" in stems:
        splits["val"] = stems["val"]
    if stems.get("test") and (folder.annotations / f"{stems['test'][0]}.xml").is_file():
        splits["test"] = stems["test"]  # of VOC2012 the list is public, the XML files are not
    return splits


def _xml_stems(base: Path, annotations: Path) -> Iterator[str]:
    """Yield the names of XML files without suffix; with lists, also of those in folders below."""
    is_nested = annotations != base and (base / "ImageSets").is_dir()
    names = files_below(annotations) if is_nested else (p.name for p in annotations.glob("*.xml"))
    for name in map(PurePosixPath, names):
        if name.suffix == ".xml" and not name.name.startswith("._"):  # of macOS
            yield name.with_suffix("").as_posix()


def _report_unlabelled(folder: _Folder, stems: set[str]) -> None:
    images = filter(is_image, folder.images.iterdir())
    unlabelled = sorted(path.name for path in images if path.stem not in stems)
    if unlabelled:
        log.info(
            "%s: %d images have no XML file and are left out, among them %s",
            folder.images,
            len(unlabelled),
            unlabelled[0],
        )


def _stems(path: Path, annotations: Path) -> list[str]:
    """Return the name in each line: lists of one class have a flag after it."""
    with read_errors(path):
        lines = read_text(path, MAX_LIST_BYTES).splitlines()
    words = []
    for line in filter(None, (line.strip() for line in lines)):
        if line.startswith('"'):  # old versions of CVAT put names with spaces in quotes
            words.append(line.split('"')[1])
        elif " " in line and is_plain_name(line) and (annotations / f"{line}.xml").is_file():
            words.append(line)
        else:
            words.append(line.split()[0])
    stems = list(dict.fromkeys(words))
    refuse(path, "not plain names", [stem for stem in stems if not is_plain_name(stem)])
    return stems


def _read_image(folder: _Folder, stem: str) -> LabeledImage | None:
    """Return an image and its boxes; None if the image does not exist."""
    path = folder.annotations / f"{stem}.xml"
    tree = read_xml(path)
    image = folder.image_of(stem, tree.findtext("filename", "").strip())
    if image is None:
        return None
    width, height = (
        whole_number(tree.findtext(f"size/{side}", "").strip() or "0", f"{path}: size/{side}")
        for side in ("width", "height")
    )
    if width <= 0 or height <= 0:  # some tools write no size
        width, height = header_size(image)
    boxes = [_box(item, path, n) for n, item in enumerate(tree.findall("object"), 1)]
    return LabeledImage(image.relative_to(folder.root).as_posix(), width, height, boxes)


def _box(item: ElementTree.Element, path: Path, number: int) -> LabeledBox:
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
    # Tools that count from 0 write xmin = 0; no box may start left of its image.
    left, top = max(left - 1, 0.0), max(top - 1, 0.0)
    return LabeledBox(name, left, top, right - left, bottom - top, is_crowd)
