"""A dataset format of another package: an entry point of `ssdctl.datasets`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli
from data.formats.exports import image_file, tree
from helpers import install_package

from ssdctl.config import DataConfig
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store_folder import dataset_folders

PLUGIN = '''
"""Read boxes.txt: lines of `file class left top width height`."""
from PIL import Image
from ssdctl.data.annotations import LabeledBox, LabeledImage, from_images

def read_lines(root, labels="boxes.txt"):
    images = {}
    for line in (root / labels).read_text().splitlines():
        file, name, *numbers = line.split()
        with Image.open(root / file) as image:
            images.setdefault(file, LabeledImage(file, *image.size, []))
        images[file].boxes.append(LabeledBox(name, *map(float, numbers)))
    return from_images({"train": list(images.values())}, ["bolt", "nut"], root, root)

class named:
    read = staticmethod(read_lines)

class broken:
    read = staticmethod(lambda path: ({}, []))

class module:
    @staticmethod
    def recognize(path):
        file = path / "boxes2.txt"
        return file if file.is_file() else None

    @staticmethod
    def read(path):
        return read_lines(path, "boxes2.txt")

class failing:
    recognize = staticmethod(lambda path: 1 / 0)
'''
ENTRIES = "[ssdctl.datasets]\nboxes-txt = boxes_txt:named\nbroken = boxes_txt:broken\n"
ENTRIES += "boxes-module = boxes_txt:module\nfailing = boxes_txt:failing\n"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install_package(tmp_path / "site", monkeypatch, "boxes_txt", PLUGIN, ENTRIES)
    boxes = "photos/a.png nut 1 2 30 40\nphotos/a.png bolt 5 5 20 20\nphotos/b.png nut 0 0 9 9"
    files = {"boxes.txt": boxes, "photos/a.png": None, "photos/b.png": None}
    return tree(tmp_path / "data", files)


def test_a_format_of_another_package_is_prepared(data: Path, cli: Cli) -> None:
    result = cli("prepare", "--data", data, "--from", "boxes-txt", "--no-pack", "--json")
    assert result.code == 0, result.err
    (split,) = json.loads(result.out)["splits"]
    assert (split["images"], split["boxes"]) == (2, 3)
    # The index is read without the package, which reading the labels again needs.
    train = open_dataset(*dataset_folders(DataConfig(root=str(data))))["train"]
    assert [c.name for c in train.classes] == ["bolt", "nut"]
    assert cli("prepare", "--data", data, "--split", 0.5, "--from", "boxes-txt").code == 0


def test_a_module_is_recognized_without_its_name(data: Path, cli: Cli) -> None:
    """It has the functions of a built-in format; one that fails does not stop the others."""
    (data / "boxes.txt").rename(data / "boxes2.txt")
    result = cli("prepare", "--data", data, "--no-pack", "--json")
    assert result.code == 0, result.err
    assert "failing" in result.err
    assert "boxes-module (boxes2.txt)" in result.err
    (split,) = json.loads(result.out)["splits"]
    assert (split["images"], split["boxes"]) == (2, 3)


@pytest.mark.parametrize(
    ("lines", "source", "code", "words"),
    [
        ("", "other", 2, ["--from other", "boxes-txt", "yolo"]),
        ("", "broken", 3, ["broken", "TypeError"]),
        ("photos/a.png ring 1 2 3 4", "boxes-txt", 3, ["boxes-txt", "'ring'"]),
        ("photos/a.png", "boxes-txt", 3, ["boxes-txt", "ValueError"]),
        ("../up.png nut 1 2 3 4", "boxes-txt", 3, ["up.png"]),
    ],
)
def test_what_a_plugin_cannot_read(
    data: Path, cli: Cli, lines: str, source: str, code: int, words: list[str]
) -> None:
    (data / "boxes.txt").write_text(lines)
    image_file(data.parent / "up.png")
    result = cli("prepare", "--data", data, "--from", source, "--no-pack")
    assert result.code == code, result.err
    assert all(word in result.err for word in words), result.err
