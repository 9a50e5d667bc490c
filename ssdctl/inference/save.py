"""Write detections for labeling tools, as a start for annotation by hand.

    writer = WRITERS["coco"](Path("labels"), classes)
    writer.add(source, result)
    writer.close()

json         detections.json, as printed with --json
coco         coco.json: a dataset with scores (CVAT, FiftyOne, Roboflow); results.json: COCO's
             results format with the same image ids
yolo         labels/NAME.txt per image, images/NAME linked to the image (or a copy), data.yaml
labelstudio  tasks.json with pre-annotations, in percent; labels.xml: the labeling interface

Boxes are clipped to their image, except in results.json. Those without an area, which lie outside
their image, are only in results.json and detections.json.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

import numpy as np

from ssdctl.config.sections import SaveFormat
from ssdctl.data.annotations import ClassName, class_texts, nfc
from ssdctl.data.coco_json import coco_document
from ssdctl.data.image_files import IMAGE_SUFFIXES
from ssdctl.errors import UsageError
from ssdctl.files import (
    disk_errors,
    free_name,
    link_or_copy,
    make_dir,
    require_own_file,
    write_bytes,
    write_text,
)
from ssdctl.inference.sources import ImageSource
from ssdctl.model.results import Result
from ssdctl.runtime.safe_text import counted

log = logging.getLogger(__name__)
RESULTS = "detections.json"
# The beginning of detections.json and detections.jsonl.
RECORDS = r'\s*\[?\s*(\]|\{\s*"image":)'
LOCAL_FILES = "/data/local-files/?d="  # Label Studio's address of a file below its document root


def image_record(name: str, result: Result, **more: Any) -> dict[str, Any]:
    """Return an image's detections as `ssdctl predict --json` prints them."""
    width, height = result.size
    detections = [d.as_json() for d in result]
    return {"image": name, **more, "width": width, "height": height, "detections": detections}


class Writer:
    """Writes the detections on images into a folder; classes are those they may have, by label."""

    names: tuple[str, ...] = ()  # files and folders that it writes and never replaces

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        self.folder = folder
        self.classes = classes
        self.entries: list[Any] = []
        self.check_folder()

    def check_folder(self) -> None:
        """Refuse to replace a dataset, whose boxes may have been corrected."""
        for path in (self.folder / name for name in self.names):
            if path.exists():
                raise UsageError(
                    f"{path}: exists already; a dataset there may have been corrected",
                    hint="choose another --out, or remove it",
                )

    def files(self) -> list[Path]:
        """Return the paths of `names`; numbered ones if another call wrote one in the meantime."""
        paths, number = [self.folder / name for name in self.names], 1
        found = paths
        while any(path.exists() for path in found):
            number += 1
            found = [path.with_stem(f"{path.stem}-{number}") for path in paths]
        if number > 1:
            log.warning("%s is of another call: this one writes %s", paths[0], found[0])
        return found

    def add(self, source: ImageSource, result: Result) -> None:
        raise NotImplementedError

    def close(self) -> str:
        """Write the files of all images; return how to import them."""
        raise NotImplementedError


class JsonWriter(Writer):
    """The list that `ssdctl predict --json` prints."""

    def check_folder(self) -> None:
        require_own_file(self.folder / RESULTS, "--out", RECORDS)

    def add(self, source: ImageSource, result: Result) -> None:
        self.entries.append(image_record(source.name, result))

    def close(self) -> str:
        _write_json(self.folder / RESULTS, self.entries)
        return f"boxes in {self.folder / RESULTS}"


class CocoWriter(Writer):
    """A dataset in COCO's format, and COCO's results."""

    names = ("coco.json", "results.json")

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        super().__init__(folder, classes)
        self._results: list[dict[str, Any]] = []

    def add(self, source: ImageSource, result: Result) -> None:
        number = len(self.entries) + 1
        self._results += [{**row, "file_name": source.name} for row in result.to_coco(number)]
        objects = []
        for d in _with_area(result):
            left, top, right, bottom = d.box
            width, height = round(right - left, 2), round(bottom - top, 2)
            category = d.label if d.category_id is None else d.category_id
            box = (left, top, width, height)
            objects.append((number, category, box, round(width * height, 2), 0, d.score))
        self.entries.append(((number, source.name, *result.size), objects))

    def close(self) -> str:
        objects = [entry for _, entries in self.entries for entry in entries]
        classes = [(label if c.id is None else c.id, c.name) for label, c in self.classes.items()]
        document = coco_document((image for image, _ in self.entries), classes, objects)
        dataset, results = self.files()
        _write_json(dataset, document)
        _write_json(results, self._results)
        images, boxes = counted(len(self.entries), "image"), counted(len(objects), "box")
        return f"{images} and {boxes} in {dataset}"


class YoloWriter(Writer):
    """A dataset in YOLO's format, of links to the images."""

    names = ("labels", "images", "data.yaml")

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        super().__init__(folder, classes)
        self._numbers = {label: number for number, label in enumerate(classes)}
        self._stems: dict[str, int] = {}

    def add(self, source: ImageSource, result: Result) -> None:
        plain = re.sub("[\ud800-\udfff]", "_", source.path.stem)  # bytes that are not UTF-8
        if not self.entries:
            labels = make_dir(self.folder) / "labels"
            self.check_folder()  # again: another call may have begun
            with disk_errors(labels, "writing"):
                labels.mkdir()
        stem = free_name(nfc(plain), self._stems)
        found = _with_area(result)
        low, high = found.boxes[:, :2] / result.size, found.boxes[:, 2:] / result.size
        rows = np.concatenate([(low + high) / 2, high - low], axis=1).tolist()
        lines = [
            f"{self._numbers[label]} {x:.6f} {y:.6f} {width:.6f} {height:.6f}\n"
            for label, (x, y, width, height) in zip(found.labels.tolist(), rows, strict=True)
        ]
        suffix = source.path.suffix
        if suffix.lower() not in IMAGE_SUFFIXES:  # a web address need not end in one
            suffix = ".jpg"
        image = self.folder / "images" / (stem + suffix)
        if isinstance(result.image, Path):
            make_dir(image.parent)
            try:
                image.symlink_to(result.image.absolute())
            except OSError:  # a file system without links
                link_or_copy(result.image, image)
        else:
            write_bytes(image, result.image.getvalue())
        write_text(self.folder / "labels" / f"{stem}.txt", "".join(lines))
        self.entries.append(stem)

    def close(self) -> str:
        import yaml

        names = dict(enumerate(class_texts([*self.classes.values()])))
        content = {"train": "images", "names": names}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_text(self.folder / "data.yaml", text)
        images = counted(len(self.entries), "image")
        return f"labels of {images} in {self.folder / 'labels'}, and data.yaml"


class LabelStudioWriter(Writer):
    """Tasks of Label Studio with predictions."""

    names = ("tasks.json", "labels.xml")

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        super().__init__(folder, classes)
        self._texts = dict(zip(classes, class_texts([*classes.values()]), strict=True))

    def add(self, source: ImageSource, result: Result) -> None:
        width, height = result.size
        results = []
        for number, d in enumerate(_with_area(result)):
            left, top, right, bottom = d.box
            results.append(
                {
                    "id": f"box{number}",
                    "type": "rectanglelabels",
                    "from_name": "label",
                    "to_name": "image",
                    "original_width": width,
                    "original_height": height,
                    "image_rotation": 0,
                    "score": d.score,
                    "value": {
                        "x": _percent(left, width),
                        "y": _percent(top, height),
                        "width": _percent(right - left, width),
                        "height": _percent(bottom - top, height),
                        "rotation": 0,
                        "rectanglelabels": [self._texts[d.label]],
                    },
                }
            )
        score = max(result.scores.tolist(), default=0.0)
        prediction = {"model_version": "ssdctl", "score": score, "result": results}
        self.entries.append((source, {"predictions": [prediction]}))

    def close(self) -> str:
        # The document root may not be the folder of the images itself, only one above it.
        folders = [_folder(s) for s, _ in self.entries if not s.url]
        root = Path(os.path.commonpath(folders)).parent if folders else None
        tasks = [{"data": {"image": _address(s, root)}, **task} for s, task in self.entries]
        file, interface = self.files()
        _write_json(file, tasks)
        labels = "".join(f"    <Label value={quoteattr(t)}/>\n" for t in self._texts.values())
        write_text(
            interface,
            '<View>\n  <Image name="image" value="$image"/>\n'
            f'  <RectangleLabels name="label" toName="image">\n{labels}  </RectangleLabels>\n'
            "</View>\n",
        )
        serve = "" if root is None else f"; LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={root} serves it"
        return f"{len(tasks)} tasks in {file}{serve}"


WRITERS: dict[SaveFormat, type[Writer]] = {
    "json": JsonWriter,
    "coco": CocoWriter,
    "yolo": YoloWriter,
    "labelstudio": LabelStudioWriter,
}


def _address(source: ImageSource, root: Path | None) -> str:
    if source.url or root is None:
        return source.name
    path = _folder(source).relative_to(root) / source.path.name
    return LOCAL_FILES + quote(os.fsencode(path.as_posix()))


def _folder(source: ImageSource) -> Path:
    """Return the folder of an image, which Label Studio refuses with `..` in it."""
    return source.path.parent.resolve()


def _percent(value: float, of: int) -> float:
    return round(100 * value / of, 4)


def _with_area(result: Result) -> Result:
    left, top, right, bottom = result.boxes.T
    return result[(right > left) & (bottom > top)]


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
