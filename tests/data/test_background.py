"""An image counts as one without objects only if its labels say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from data.formats import exports

from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.open_dataset import count_images, open_dataset


def _yolo(root: Path) -> None:
    exports.tree(root, {"images/a.png": None, "images/b.png": None, "images/c.png": None})
    exports.tree(root, {"labels/a.txt": "0 0.5 0.5 0.5 0.5\n", "labels/b.txt": ""})
    exports.tree(root, {"classes.txt": "bolt\n"})


def _kitti(root: Path) -> None:
    numbers = "0 0 0 1 1 5 5 1 1 1 0 0 0 0\n"
    for name, text in (("a", f"Car {numbers}"), ("b", ""), ("c", f"DontCare {numbers}")):
        exports.tree(root, {f"training/label_2/{name}.txt": text})
        exports.tree(root, {f"training/image_2/{name}.png": None})


@pytest.mark.parametrize("write", [_yolo, _kitti])
def test_only_an_image_whose_labels_are_empty_is_without_objects(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    write(tmp_path)
    folders = tmp_path, tmp_path / "store"
    assert count_images(*folders)[:2] == (1, 1)
    splits = open_dataset(*folders)
    split = splits["train"]
    assert [Path(split.location(int(row))).stem for row in split.background] == ["b"]
    assert export_dataset(splits, tmp_path / "exported", "coco") == {"train": 2}
    assert count_images(tmp_path / "exported", tmp_path / "other")[:2] == (1, 1)
