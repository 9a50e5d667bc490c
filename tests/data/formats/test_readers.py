"""Independent readers find the same boxes in every export as ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from data.formats import exports

from ssdctl.data.dataset import find

Box = tuple[str, str, float, float, float, float]  # file, class, left, top, right, bottom


def ours(path: Path, split: str) -> list[Box]:
    splits = find(path)[1].read(path)
    return rounded(
        (file.replace("\\", "/").rpartition("/")[2], name, x, y, x + w, y + h)
        for file, boxes in exports.boxes_of(splits, split).items()
        for name, (x, y, w, h), _ in boxes
    )


def rounded(boxes: Iterator[Box]) -> list[Box]:
    return sorted((file, name, *(round(v, 2) for v in sides)) for file, name, *sides in boxes)


def supervised(kind: str, *paths: str) -> Callable[[Path], Iterator[Box]]:
    """Supervision on a format, by the paths of its images and labels."""

    def read(root: Path) -> Iterator[Box]:
        import supervision

        (root / "names.yaml").write_text(f"names: {list(exports.NAMES)}\nnc: 2\n")  # for YOLO
        read = getattr(supervision.DetectionDataset, f"from_{kind}")
        dataset = read(*(str(root / p) for p in paths))
        for path, _, found in dataset:
            for box, label in zip(found.xyxy, found.class_id, strict=True):
                yield Path(path).name, dataset.classes[label], *box.tolist()
        (root / "names.yaml").unlink()

    return read


def cvat_xml(root: Path) -> Iterator[Box]:
    import globox

    for image in globox.AnnotationSet.from_cvat(root / "annotations.xml"):
        for box in image.boxes:
            yield Path(image.image_id).name, box.label, *box.ltrb


READERS: dict[str, Callable[[Path], Iterator[Box]]] = {
    "cvat_coco": supervised("coco", "images", "annotations/instances_default.json"),
    "roboflow_coco": supervised("coco", "train", "train/_annotations.coco.json"),
    "roboflow_yolo": supervised("yolo", "train/images", "train/labels", "names.yaml"),
    "ultralytics_yolo": supervised("yolo", "images/train", "labels/train", "names.yaml"),
    "darknet": supervised("yolo", "data/img", "data/img", "names.yaml"),
    "voc_lists": supervised("pascal_voc", "JPEGImages", "Annotations"),
    "voc_plain": supervised("pascal_voc", "images", "Annotations"),
    "voc_other_names": supervised("pascal_voc", "images", "annots"),
    "voc_mirrored": supervised("pascal_voc", "images/train", "annotations/train"),
    "cvat_xml": cvat_xml,
}


@pytest.mark.parametrize("name", READERS)
def test_an_independent_reader_finds_the_same_boxes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("supervision")
    pytest.importorskip("globox")
    root = tmp_path / "export"
    root.mkdir()
    path = getattr(exports, name)(root)
    expected = ours(path, "train")
    found = list(READERS[name](root))
    if name in ("darknet", "voc_lists"):  # one folder for all splits
        expected = sorted(expected + ours(path, "val"))
    same = [box[:2] for box in rounded(iter(found))] == [box[:2] for box in expected]
    assert same, (found, expected)
    np.testing.assert_allclose(
        [box[2:] for box in rounded(iter(found))], [box[2:] for box in expected], atol=0.02
    )
    assert len(expected) >= 7
