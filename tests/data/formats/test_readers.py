"""Independent readers find the same boxes in every export as ours."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from data.formats import exports

from ssdctl.data.formats import find

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


def label_studio(root: Path) -> Iterator[Box]:
    """pycocotools: Supervision does not find images by the paths of Label Studio's server."""
    from pycocotools.coco import COCO

    read = COCO(str(root / "result.json"))
    for entry in read.dataset["annotations"]:
        file = read.imgs[entry["image_id"]]["file_name"].replace("\\", "/").rpartition("/")[2]
        x, y, w, h = entry["bbox"]
        yield file, read.cats[entry["category_id"]]["name"], x, y, x + w, y + h


def of_globox(annotations: object, names: dict[str, str] | None = None) -> Iterator[Box]:
    for image in annotations:  # type: ignore[attr-defined]
        for box in image.boxes:
            label = (names or {}).get(box.label, box.label)
            sides = box.ltrb
            yield Path(image.image_id).stem, label, *sides


def cvat_xml(root: Path) -> Iterator[Box]:
    import globox

    yield from of_globox(globox.AnnotationSet.from_cvat(root / "annotations.xml"))


def open_images(root: Path) -> Iterator[Box]:
    import globox

    text = (root / "class-descriptions-boxable.csv").read_text()
    names = dict(csv.reader(text.splitlines()))
    file = root / "oidv6-train-annotations-bbox.csv"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("f" * 16)]
    file.write_text("\n".join(lines) + "\n")  # it requires all images, without suffix
    for image in (root / "train").glob("*.jpg"):
        image.rename(image.with_suffix(""))
    read = globox.AnnotationSet.from_openimage
    yield from of_globox(read(file, image_folder=root / "train"), names)


def tf_csv(file: str) -> Callable[[Path], Iterator[Box]]:
    def read(root: Path) -> Iterator[Box]:
        import polars

        columns = ("filename", "class", "xmin", "ymin", "xmax", "ymax")
        yield from polars.read_csv(root / file).select(columns).iter_rows()

    return read


def kitti(root: Path) -> Iterator[Box]:
    """Polars on the columns of KITTI's readme."""
    import polars

    for path in sorted((root / "training/label_2").glob("*.txt")):
        table = polars.read_csv(path, separator=" ", has_header=False)
        for row in table.iter_rows():
            if row[0] != "DontCare":
                yield path.with_suffix(".png").name, row[0], *map(float, row[4:8])


READERS: dict[str, Callable[[Path], Iterator[Box]]] = {
    "cvat_coco": supervised("coco", "images", "annotations/instances_default.json"),
    "roboflow_coco": supervised("coco", "train", "train/_annotations.coco.json"),
    "label_studio_coco": label_studio,
    "roboflow_yolo": supervised("yolo", "train/images", "train/labels", "names.yaml"),
    "ultralytics_yolo": supervised("yolo", "images/train", "labels/train", "names.yaml"),
    "darknet": supervised("yolo", "data/img", "data/img", "names.yaml"),
    "voc_lists": supervised("pascal_voc", "JPEGImages", "Annotations"),
    "voc_plain": supervised("pascal_voc", "images", "Annotations"),
    "voc_other_names": supervised("pascal_voc", "images", "annots"),
    "voc_mirrored": supervised("pascal_voc", "images/train", "annotations/train"),
    "cvat_xml": cvat_xml,
    "open_images": open_images,
    "tf_csv": tf_csv("data/train_labels.csv"),
    "roboflow_tf_csv": tf_csv("train/_annotations.csv"),
    "kitti": kitti,
}


@pytest.mark.parametrize("name", sorted({*exports.EXPORTS, "voc_mirrored"}))
def test_an_independent_reader_finds_the_same_boxes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("supervision")
    pytest.importorskip("globox")
    make = exports.EXPORTS[name][0] if name in exports.EXPORTS else exports.voc_mirrored
    root = tmp_path / "export"
    root.mkdir()
    path = make(root)
    expected = ours(path, "train")
    found = list(READERS[name](root))
    if name in ("darknet", "voc_lists"):  # one folder for all splits
        expected = sorted(expected + ours(path, "val"))
    if not Path(found[0][0]).suffix:  # a reader that knows images by their stem
        expected = [(Path(file).stem, *rest) for file, *rest in expected]  # type: ignore[misc]
    same = [box[:2] for box in rounded(iter(found))] == [box[:2] for box in expected]
    assert same, (found, expected)
    np.testing.assert_allclose(
        [box[2:] for box in rounded(iter(found))], [box[2:] for box in expected], atol=0.02
    )
    assert len(expected) >= 7
