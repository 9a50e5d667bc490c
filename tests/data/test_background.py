"""An image counts as one without objects only if its labels say so."""

from pathlib import Path

import pytest
from data.formats import exports

from ssdctl.data.export_dataset import export_dataset
from ssdctl.data.open_dataset import count_images, open_dataset

IMAGES = ("images/a.png", "images/b.png", "images/c.png")
LABELS = {"labels/a.txt": "0 0.5 0.5 0.5 0.5\n", "labels/b.txt": "", "classes.txt": "bolt\n"}
NUMBERS = "0 0 0 1 1 5 5 1 1 1 0 0 0 0\n"
KITTI = {"a": f"Car {NUMBERS}", "b": "", "c": f"DontCare {NUMBERS}"}


@pytest.mark.parametrize(
    "files",
    [
        {**dict.fromkeys(IMAGES), **LABELS},
        {f"training/image_2/{name}.png": None for name in KITTI}
        | {f"training/label_2/{name}.txt": text for name, text in KITTI.items()},
    ],
)
def test_only_an_image_whose_labels_are_empty_is_without_objects(
    tmp_path: Path, files: dict[str, str | None]
) -> None:
    exports.tree(tmp_path, files)
    folders = tmp_path, tmp_path / "store"
    assert count_images(*folders)[:2] == (1, 1)
    splits = open_dataset(*folders)
    split = splits["train"]
    assert [Path(split.location(int(row))).stem for row in split.background] == ["b"]
    assert export_dataset(splits, tmp_path / "exported", "coco") == {"train": 2}
    assert count_images(tmp_path / "exported", tmp_path / "other")[:2] == (1, 1)
