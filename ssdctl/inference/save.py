"""Write detections for labeling tools, as a start for annotation by hand. Torch-free.

    writer = open_writer("coco", Path("labels"), classes)
    writer.add(source, result)
    writer.close()

json         detections.json, as printed with --json
coco         coco.json: a dataset with scores (CVAT, FiftyOne, Roboflow); results.json: COCO's
             results format with the same image ids
yolo         labels/NAME.txt per image, images/NAME linked to the image, data.yaml
labelstudio  tasks.json with pre-annotations, in percent; labels.xml: the labeling interface

Boxes without an area, which lie outside their image, are left out of all but `json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ssdctl.config.sections.evaluate import SaveFormat
from ssdctl.data.classes import ClassName
from ssdctl.errors import UsageError
from ssdctl.files import disk_errors, make_dir, write_bytes, write_text
from ssdctl.inference.image_sources import Source, UrlSource
from ssdctl.inference.results import Result

LOCAL_FILES = "/data/local-files/?d="  # Label Studio's address of a file below its document root


class Writer(Protocol):
    """Write the detections on images into a folder."""

    def add(self, source: Source, result: Result) -> None:
        """Add one image."""

    def close(self) -> str:
        """Write the files of all images; return how to import them."""


def open_writer(save: SaveFormat, folder: Path, classes: Mapping[int, ClassName]) -> Writer:
    """Return the writer of a format.

    Args:
        save: The format.
        folder: Created if it does not exist.
        classes: Those that detections may have, by label; they are numbered in this order.

    Raises:
        UsageError: `yolo`, and the folder has a dataset, which may have been corrected by hand.
    """
    if save == "json":
        return JsonWriter(folder)
    if save == "coco":
        return CocoWriter(folder, classes)
    if save == "yolo":
        return YoloWriter(folder, classes)
    return LabelStudioWriter(folder, classes)


def image_record(name: str, result: Result, **more: Any) -> dict[str, Any]:
    """Return an image's detections as `ssdctl predict --json` prints them."""
    width, height = result.size
    detections = [d.as_json() for d in result]
    return {"image": name, **more, "width": width, "height": height, "detections": detections}


class JsonWriter:
    """The list that `ssdctl predict --json` prints."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "detections.json"
        self._records: list[dict[str, Any]] = []

    def add(self, source: Source, result: Result) -> None:
        """Add one image."""
        self._records.append(image_record(source.name, result))

    def close(self) -> str:
        """Write detections.json."""
        _write_json(self._path, self._records)
        return f"boxes in {self._path}"


class CocoWriter:
    """A dataset in COCO's format, and COCO's results."""

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        self._folder = folder
        self._categories = [
            {"id": label if c.id is None else c.id, "name": c.name, "supercategory": ""}
            for label, c in classes.items()
        ]
        self._images: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []

    def add(self, source: Source, result: Result) -> None:
        """Add one image."""
        number = len(self._images) + 1
        width, height = result.size
        image = {"id": number, "file_name": source.name, "width": width, "height": height}
        self._images.append(image)
        self._results += _with_area(result).to_coco(number)

    def close(self) -> str:
        """Write coco.json and results.json."""
        annotations = [
            {
                "id": number,
                **result,
                "area": round(result["bbox"][2] * result["bbox"][3], 2),
                "iscrowd": 0,
                "segmentation": [],
            }
            for number, result in enumerate(self._results, start=1)
        ]
        dataset = {
            "images": self._images,
            "annotations": annotations,
            "categories": self._categories,
        }
        _write_json(self._folder / "coco.json", dataset)
        _write_json(self._folder / "results.json", self._results)
        return (
            f"{len(self._images)} images and {len(annotations)} boxes in "
            f"{self._folder / 'coco.json'}"
        )


class YoloWriter:
    """A dataset in YOLO's format, of links to the images."""

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        self._folder = folder
        self._numbers = {label: number for number, label in enumerate(classes)}
        self._names = [c.name for c in classes.values()]
        self._stems: set[str] = set()
        for path in (folder / "labels", folder / "images", folder / "data.yaml"):
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                raise UsageError(
                    f"{path}: exists already; a dataset there may have been corrected",
                    hint="choose another --out, or remove it",
                )

    def add(self, source: Source, result: Result) -> None:
        """Write the labels of one image, and link it."""
        stem = free_stem(source.file_name, self._stems)
        width, height = result.size
        lines = []
        for d in _with_area(result):
            left, top, right, bottom = d.box
            center = f"{(left + right) / 2 / width:.6f} {(top + bottom) / 2 / height:.6f}"
            size = f"{(right - left) / width:.6f} {(bottom - top) / height:.6f}"
            lines.append(f"{self._numbers[d.label]} {center} {size}\n")
        write_text(self._folder / "labels" / f"{stem}.txt", "".join(lines))
        suffix = Path(source.file_name).suffix or ".jpg"
        image = self._folder / "images" / (stem + suffix)
        if not isinstance(result.image, Path):
            write_bytes(image, result.image.getvalue())
            return
        make_dir(image.parent)
        with disk_errors(image, "linking"):
            image.symlink_to(result.image.absolute())

    def close(self) -> str:
        """Write data.yaml."""
        # JSON strings are YAML strings.
        names = "".join(f"  {n}: {json.dumps(name)}\n" for n, name in enumerate(self._names))
        described = f"train: images\nval: images\nnames:\n{names}"
        write_text(self._folder / "data.yaml", described)
        return f"labels of {len(self._stems)} images in {self._folder / 'labels'}, and data.yaml"


class LabelStudioWriter:
    """Tasks of Label Studio with predictions."""

    def __init__(self, folder: Path, classes: Mapping[int, ClassName]) -> None:
        self._folder = folder
        self._names = [c.name for c in classes.values()]
        self._tasks: list[tuple[Source, dict[str, Any]]] = []

    def add(self, source: Source, result: Result) -> None:
        """Add one image."""
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
                        "rectanglelabels": [d.name],
                    },
                }
            )
        score = max(result.scores.tolist(), default=0.0)
        prediction = {"model_version": "ssdctl", "score": score, "result": results}
        self._tasks.append((source, {"predictions": [prediction]}))

    def close(self) -> str:
        """Write tasks.json and labels.xml."""
        # The document root may not be the folder of the images itself, only one above it.
        folders = [
            str(s.path.absolute().parent) for s, _ in self._tasks if not isinstance(s, UrlSource)
        ]
        root = Path(os.path.commonpath(folders)).parent if folders else None
        tasks = [{"data": {"image": _address(s, root)}, **task} for s, task in self._tasks]
        _write_json(self._folder / "tasks.json", tasks)
        labels = "".join(f"    <Label value={quoteattr(name)}/>\n" for name in self._names)
        write_text(
            self._folder / "labels.xml",
            '<View>\n  <Image name="image" value="$image"/>\n'
            f'  <RectangleLabels name="label" toName="image">\n{labels}  </RectangleLabels>\n'
            "</View>\n",
        )
        serve = "" if root is None else f"; LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={root} serves it"
        return f"{len(tasks)} tasks in {self._folder / 'tasks.json'}{serve}"


def _address(source: Source, root: Path | None) -> str:
    """Return where Label Studio finds an image."""
    if isinstance(source, UrlSource) or root is None:
        return source.name
    return LOCAL_FILES + quote(source.path.absolute().relative_to(root).as_posix())


def _percent(value: float, of: int) -> float:
    return round(100 * value / of, 4)


def _with_area(result: Result) -> Result:
    left, top, right, bottom = result.boxes.T
    return result[(right > left) & (bottom > top)]


def free_stem(file_name: str, taken: set[str]) -> str:
    """Return an unused name without suffix: images of two folders may have the same name."""
    stem = name = Path(file_name).stem
    number = 2
    while name in taken:
        name, number = f"{stem}-{number}", number + 1
    taken.add(name)
    return name


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
