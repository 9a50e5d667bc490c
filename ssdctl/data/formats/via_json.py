"""Read the JSON of the VGG Image Annotator (VIA 1 and 2): an export of regions, or a project.

Rectangles are read, and polygons, circles and ellipses by their extent. Points and lines are
counted and left out. The class is the region's only attribute, or the only one called class, label,
name, type, category or object. Without attributes all regions are of the class `object`. A word
such as train or val in the name of the file or its folder gives the split.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ssdctl.data.annotations import Annotations, LabeledBox, LabeledImage
from ssdctl.data.find_images import ImageFinder, located
from ssdctl.data.formats import (
    around,
    by_split,
    files_near,
    from_upright_images,
    read_json,
    some_files_near,
    with_words,
)
from ssdctl.data.image_files import dataset_folder
from ssdctl.errors import DataError

LOOKED_FOR = ("via_region_data.json",)
PROJECT = b'"_via_img_metadata"'
ATTRIBUTES = ("class", "label", "name", "type", "category", "object")
MENUS = ("dropdown", "radio", "checkbox")
ONLY_CLASS = "object"
UNLABELED = "regions without a class"


class _Region(msgspec.Struct):
    shape_attributes: dict[str, Any]
    region_attributes: dict[str, Any] = {}


class _Image(msgspec.Struct):
    filename: str
    regions: list[_Region] | dict[str, _Region] = []  # a table in VIA 1

    def all_regions(self) -> Iterable[_Region]:
        return self.regions.values() if isinstance(self.regions, dict) else self.regions


class _Project(msgspec.Struct):
    images: dict[str, _Image] = msgspec.field(name="_via_img_metadata")
    attributes: Any = msgspec.field(name="_via_attributes", default=None)


def recognize(path: Path) -> Path | None:
    return next(iter(_exports(some_files_near(path, LOOKED_FOR))), None)


def _exports(files: list[Path]) -> list[Path]:
    exports = with_words(files, b'"filename"', b'"regions"', b'"size"')
    return [*dict.fromkeys([*exports, *with_words(files, PROJECT)])]


def read(path: Path, image_dir: str | None = None) -> dict[str, Annotations]:
    """Return the splits of a folder, or of its JSON file; classes are sorted by name."""
    root, files, notes = dataset_folder(path), _exports(files_near(path)), list[str]()
    if not files:
        raise DataError(f"{path}: no JSON file of VIA (looked for via_region_data.json)")
    contents = {file: _content(file) for file in files}
    names = {file: {image.filename for image in content} for file, content in contents.items()}
    chosen = by_split(root, files, names.__getitem__, notes)
    attribute = _attribute(files[0], [i for file in chosen.values() for i in contents[file]])
    counts: Counter[str] = Counter()
    splits = {
        split: (file, [_labeled(file, image, attribute, counts) for image in contents[file]])
        for split, file in chosen.items()
    }
    notes += [f"{kind}, left out: {count:,}" for kind, count in counts.items()]
    return from_upright_images(
        root, located(ImageFinder(root, image_dir=image_dir), splits, notes), None, chosen, notes
    )


def _content(file: Path) -> list[_Image]:
    if with_words([file], PROJECT):
        project = read_json(file, _Project, "via-json")
        images = [*project.images.values()]
        for name, texts in _options(project.attributes).items():
            for region in (region for image in images for region in image.all_regions()):
                value = region.region_attributes.get(name)
                region.region_attributes[name] = _with_texts(value, texts)
        return images
    return [*read_json(file, dict[str, _Image], "via-json").values()]


def _options(attributes: Any) -> dict[str, dict[str, Any]]:
    """Return the texts of options by their ids, for each attribute of regions with a menu."""
    regions = attributes.get("region") if isinstance(attributes, dict) else None
    found = regions.items() if isinstance(regions, dict) else ()
    menus = {
        n: a.get("options") for n, a in found if isinstance(a, dict) and a.get("type") in MENUS
    }
    return {name: texts for name, texts in menus.items() if isinstance(texts, dict)}


def _with_texts(value: Any, options: Mapping[str, Any]) -> Any:
    """Return the value of an attribute with texts instead of the ids of options."""
    if isinstance(value, dict):
        return {_with_texts(name, options): is_set for name, is_set in value.items()}
    return options.get(value) or value if isinstance(value, str) else value


def _attribute(file: Path, images: Iterable[_Image]) -> str | None:
    """Return the name of the attribute that has the class; None if there are no attributes."""
    regions = [region for image in images for region in image.all_regions()]
    used = {name for region in regions for name, v in region.region_attributes.items() if v}
    known = used if len(used) < 2 else {name for name in used if name.lower() in ATTRIBUTES}
    if used and len(known) != 1:
        raise DataError(
            f"{file}: which attribute of the regions is the class: {', '.join(sorted(used))}?",
            hint=f"name only one of them {', '.join(ATTRIBUTES[:-1])} or {ATTRIBUTES[-1]}",
        )
    return next(iter(known), None)


def _labeled(
    file: Path, image: _Image, attribute: str | None, counts: Counter[str]
) -> LabeledImage:
    boxes, num_regions = [], 0
    for region in image.all_regions():
        num_regions += 1
        label = ONLY_CLASS if attribute is None else _label(region.region_attributes.get(attribute))
        try:
            box = _box(label, region.shape_attributes)
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{file}: {image.filename}: a region without its coordinates") from None
        if box is not None and label:
            boxes.append(box)
        else:
            shape = region.shape_attributes.get("name")
            counts[f"regions of the shape {shape}" if box is None else UNLABELED] += 1
    is_complete = len(boxes) == num_regions
    return LabeledImage(image.filename, 0, 0, boxes, is_complete=is_complete)


def _label(value: Any) -> str:
    """Return the class of a text, or of the only box that is checked; "" if there is none."""
    if isinstance(value, dict):
        checked = [name for name, is_set in value.items() if is_set]
        return checked[0] if len(checked) == 1 else ""
    return "" if value is None else str(value).strip()


def _box(label: str, shape: dict[str, Any]) -> LabeledBox | None:
    kind = shape["name"]
    if kind == "rect":
        left, top, width, height = (float(shape[key]) for key in ("x", "y", "width", "height"))
        return around(label, [left, left + width], [top, top + height])
    if kind in ("circle", "ellipse"):
        x, y = float(shape["cx"]), float(shape["cy"])
        a, b = (shape["r"],) * 2 if kind == "circle" else (shape["rx"], shape["ry"])
        cosine, sine = math.cos(shape.get("theta", 0)), math.sin(shape.get("theta", 0))
        half_w, half_h = math.hypot(a * cosine, b * sine), math.hypot(a * sine, b * cosine)
        return around(label, [x - half_w, x + half_w], [y - half_h, y + half_h])
    if kind == "polygon":
        return around(label, shape["all_points_x"], shape["all_points_y"])
    return None
