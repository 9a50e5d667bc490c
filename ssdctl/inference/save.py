"""Write detections for labelling tools, as a start for annotation by hand. Torch-free.

    writer = open_writer("coco", Path("labels"), classes)
    writer.add(result)
    writer.close()

json         detections.json, as printed with --json
coco         coco.json: a dataset with scores (CVAT, FiftyOne, Roboflow); results.json: COCO's
             results format with the same image ids
yolo         labels/NAME.txt per picture, images/NAME linked to the picture, data.yaml
labelstudio  tasks.json with pre-annotations, in percent; labels.xml: the labelling interface

Boxes without an area, which lie outside their picture, are left out of all but `json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from ssdctl.config.sections.evaluate import SaveFormat
from ssdctl.errors import UsageError
from ssdctl.files import disk_errors, make_dir, write_bytes, write_text
from ssdctl.inference.results import Detection, LabelledClass, Prediction
from ssdctl.inference.sources import Source, UrlSource

LOCAL_FILES = "/data/local-files/?d="  # Label Studio's address of a file below its document root


class Writer(Protocol):
    """Write the detections of pictures into a folder."""

    def add(self, result: Prediction) -> None:
        """Add one picture."""

    def close(self) -> str:
        """Write the files of all pictures; return how to import them."""


def open_writer(save: SaveFormat, folder: Path, classes: Sequence[LabelledClass]) -> Writer:
    """Return the writer of a format.

    Args:
        save: The format.
        folder: Created if it does not exist.
        classes: Those that detections may have; they get their numbers in this order.

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


class JsonWriter:
    """The list that `ssdctl predict --json` prints."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "detections.json"
        self._records: list[dict[str, Any]] = []

    def add(self, result: Prediction) -> None:
        """Add one picture."""
        self._records.append(result.as_json())

    def close(self) -> str:
        """Write detections.json."""
        _write_json(self._path, self._records)
        return f"boxes in {self._path}"


class CocoWriter:
    """A dataset in COCO's format, and COCO's results."""

    def __init__(self, folder: Path, classes: Sequence[LabelledClass]) -> None:
        self._folder = folder
        self._categories = [
            {"id": c.category_id, "name": c.name, "supercategory": ""} for c in classes
        ]
        self._ids = {c.label: c.category_id for c in classes}
        self._images: list[dict[str, Any]] = []
        self._results: list[dict[str, Any]] = []

    def add(self, result: Prediction) -> None:
        """Add one picture."""
        number = len(self._images) + 1
        width, height = result.size
        image = {"id": number, "file_name": result.source.name, "width": width, "height": height}
        self._images.append(image)
        for detection, box in _boxes(result.found):
            self._results.append(
                {
                    "image_id": number,
                    "category_id": self._ids[detection.label],
                    "bbox": list(box),
                    "score": detection.score,
                }
            )

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
            f"{len(self._images)} pictures and {len(annotations)} boxes in "
            f"{self._folder / 'coco.json'}"
        )


class YoloWriter:
    """A dataset in YOLO's layout, of which the pictures are links."""

    def __init__(self, folder: Path, classes: Sequence[LabelledClass]) -> None:
        self._folder = folder
        self._numbers = {c.label: number for number, c in enumerate(classes)}
        self._names = [c.name for c in classes]
        self._stems: set[str] = set()
        for path in (folder / "labels", folder / "images", folder / "data.yaml"):
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                raise UsageError(
                    f"{path}: exists already; a dataset there may have been corrected",
                    hint="choose another --out, or remove it",
                )

    def add(self, result: Prediction) -> None:
        """Write the labels of one picture, and link it."""
        size = result.size
        stem = free_stem(result.source.file_name, self._stems)
        lines = [
            f"{self._numbers[detection.label]} {(left + width / 2) / size[0]:.6f} "
            f"{(top + height / 2) / size[1]:.6f} {width / size[0]:.6f} {height / size[1]:.6f}\n"
            for detection, (left, top, width, height) in _boxes(result.found)
        ]
        write_text(self._folder / "labels" / f"{stem}.txt", "".join(lines))
        suffix = Path(result.source.file_name).suffix or ".jpg"
        image = self._folder / "images" / (stem + suffix)
        if not isinstance(result.content, Path):
            write_bytes(image, result.content.getvalue())
            return
        make_dir(image.parent)
        with disk_errors(image, "linking"):
            image.symlink_to(result.content.absolute())

    def close(self) -> str:
        """Write data.yaml."""
        # JSON strings are YAML strings.
        names = "".join(f"  {n}: {json.dumps(name)}\n" for n, name in enumerate(self._names))
        described = f"train: images\nval: images\nnames:\n{names}"
        write_text(self._folder / "data.yaml", described)
        return f"labels of {len(self._stems)} pictures in {self._folder / 'labels'}, and data.yaml"


class LabelStudioWriter:
    """Tasks of Label Studio with predictions."""

    def __init__(self, folder: Path, classes: Sequence[LabelledClass]) -> None:
        self._folder = folder
        self._names = [c.name for c in classes]
        self._tasks: list[tuple[Source, dict[str, Any]]] = []

    def add(self, result: Prediction) -> None:
        """Add one picture."""
        size = result.size
        results = [
            {
                "id": f"box{number}",
                "type": "rectanglelabels",
                "from_name": "label",
                "to_name": "image",
                "original_width": size[0],
                "original_height": size[1],
                "image_rotation": 0,
                "score": detection.score,
                "value": {
                    "x": _percent(left, size[0]),
                    "y": _percent(top, size[1]),
                    "width": _percent(width, size[0]),
                    "height": _percent(height, size[1]),
                    "rotation": 0,
                    "rectanglelabels": [detection.name],
                },
            }
            for number, (detection, (left, top, width, height)) in enumerate(_boxes(result.found))
        ]
        score = max((d.score for d in result.found), default=0.0)
        prediction = {"model_version": "ssdctl", "score": score, "result": results}
        self._tasks.append((result.source, {"predictions": [prediction]}))

    def close(self) -> str:
        """Write tasks.json and labels.xml."""
        # The document root may not be the folder of the pictures itself, only one above it.
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
    """Return where Label Studio finds a picture."""
    if isinstance(source, UrlSource) or root is None:
        return source.name
    return LOCAL_FILES + quote(source.path.absolute().relative_to(root).as_posix())


def _percent(value: float, of: int) -> float:
    return round(100 * value / of, 4)


def _boxes(
    found: Sequence[Detection],
) -> list[tuple[Detection, tuple[float, float, float, float]]]:
    """Return the detections that have an area, with left, top, width and height in pixels."""
    boxes = []
    for detection in found:
        left, top, right, bottom = detection.box
        if right > left and bottom > top:
            boxes.append((detection, (left, top, round(right - left, 2), round(bottom - top, 2))))
    return boxes


def free_stem(file_name: str, taken: set[str]) -> str:
    """Return an unused name without suffix: pictures of two folders may have the same name."""
    stem = name = Path(file_name).stem
    number = 2
    while name in taken:
        name, number = f"{stem}-{number}", number + 1
    taken.add(name)
    return name


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
