"""The Python API and `ssdctl predict`: the boxes that the evaluation gives, on anybody's pictures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Result
from PIL import Image

import ssdctl
from ssdctl.errors import DataError, UsageError
from ssdctl.inference.drawing import label_font
from ssdctl.inference.predict import Predictor

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def predictor(tiny_run: Path) -> Predictor:
    return ssdctl.load(tiny_run, device="cpu", score=0.02)


@pytest.fixture(scope="module")
def picture(shapes: Path) -> Path:
    return sorted((shapes / "val2017").iterdir())[0]


def test_importing_ssdctl_imports_no_torch() -> None:
    code = "import sys, ssdctl; assert ssdctl.load and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_kind_of_picture(predictor: Predictor, picture: Path) -> None:
    found = predictor.predict(picture)
    assert found
    with Image.open(picture) as image:
        assert predictor.predict(image) == found
        assert predictor.predict(np.asarray(image.convert("RGB"))) == found
        width, height = image.size
    assert predictor.predict(str(picture)) == found
    assert [f.score for f in found] == sorted((f.score for f in found), reverse=True)
    for item in found:
        assert item.name == predictor.class_names[item.label - 1]
        left, top, right, bottom = item.box
        assert 0 <= left <= right <= width
        assert 0 <= top <= bottom <= height


def test_many_at_once_are_as_one_by_one(predictor: Predictor, shapes: Path) -> None:
    pictures = sorted((shapes / "val2017").iterdir())[:3]
    together = predictor.predict_many(pictures)
    for found, path in zip(together, pictures, strict=True):
        alone = predictor.predict(path)
        assert [f.label for f in found] == [f.label for f in alone]
        np.testing.assert_allclose([f.box for f in found], [f.box for f in alone], atol=0.05)
    assert predictor.predict_many([]) == []


def test_the_same_boxes_as_evaluate(
    cli: Cli, predictor: Predictor, checkpoint: Path, shapes: Path
) -> None:
    low = ("--score-threshold", 0.02, "--device", "cpu")
    assert cli("evaluate", checkpoint, "--detections", "d.json", *low).code == 0
    listed = json.loads((shapes / "annotations/instances_val2017.json").read_text())["images"]
    rows = json.loads(Path("d.json").read_text())
    for image in listed[:3]:
        evaluated = [r for r in rows if r["image_id"] == image["id"]]
        predicted = predictor.predict(shapes / "val2017" / image["file_name"])
        assert [f.category_id for f in predicted] == [r["category_id"] for r in evaluated]
        scores = [r["score"] for r in evaluated]
        np.testing.assert_allclose([f.score for f in predicted], scores, atol=2e-5)
        x, y, w, h = np.array([r["bbox"] for r in evaluated]).T
        size = [image["width"], image["height"]] * 2
        boxes = np.stack([x, y, x + w, y + h], axis=1).clip(0, size)
        np.testing.assert_allclose([f.box for f in predicted], boxes, atol=0.02)


def test_turned_pictures_are_put_upright(predictor: Predictor, picture: Path) -> None:
    with Image.open(picture) as image:
        upright = image.convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise
    path = Path("turned.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)
    expected = predictor.predict(upright)
    assert expected
    assert predictor.predict(path) == expected
    assert predictor.predict(path.read_bytes()) == expected
    with Image.open(path) as image, path.open("rb") as file:
        assert predictor.predict(image) == expected
        assert predictor.predict(file) == expected
    pixels = torch.from_numpy(np.array(upright))
    assert predictor.predict(pixels.permute(2, 0, 1)) == expected


@pytest.mark.parametrize("content", [b"", b"no picture", b"\xff\xd8\xff\xe0 cut"])
def test_no_picture(predictor: Predictor, content: bytes) -> None:
    Path("x.jpg").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.jpg: not a readable image"):
        predictor.predict("x.jpg")


def test_usage_errors_of_the_api(predictor: Predictor, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="type float64"):
        predictor.predict(np.zeros((5, 5, 3)))
    with pytest.raises(UsageError, match="no such file"):
        ssdctl.load("none.pt", device="cpu")
    with pytest.raises(UsageError, match="does not compute in fp8"):
        ssdctl.load(checkpoint, device="cpu", precision="fp8")


def test_letters_of_other_languages_are_drawn() -> None:
    """Not the empty box that stands for a letter which the font lacks."""
    font = label_font(16)
    missing = bytes(font.getmask("\U0010ffff"))
    for letter in "aäßñøřżжщλ":
        assert bytes(font.getmask(letter)) != missing, letter


def test_folders_patterns_and_bad_files(cli: Cli, checkpoint: Path, shapes: Path) -> None:
    pictures = sorted((shapes / "val2017").iterdir())[:5]
    Path("photos/deep").mkdir(parents=True)
    for path in pictures[:2]:
        shutil.copy(path, "photos")
    shutil.copy(pictures[2], f"photos/deep/{pictures[0].name}")  # a name that is taken
    Path("photos/bad.png").write_text("no picture")
    result = cli(
        "predict", checkpoint, "photos", "photos/deep/*", "--out", "drawn", "--bs", 2, "--json",
        "--score", 0.02, "--device", "cpu",
    )  # fmt: skip
    assert result.code == 3  # one was bad, the rest went on
    assert "photos/bad.png: " in result.err
    assert "1 of 4" in result.err
    answers = json.loads(result.out)
    names = [a["image"] for a in answers]
    assert names == [*(f"photos/{p.name}" for p in pictures[:2]), f"photos/deep/{pictures[0].name}"]
    assert json.loads(Path("drawn/detections.json").read_text()) == answers
    drawn = sorted(p.name for p in Path("drawn").glob("*.png"))
    stems = [pictures[0].stem, pictures[1].stem]
    assert drawn == sorted([f"{stems[0]}.png", f"{stems[1]}.png", f"{stems[0]}-2.png"])
    with Image.open(f"drawn/{stems[0]}.png") as image:
        assert image.size == (answers[0]["width"], answers[0]["height"])


@pytest.mark.parametrize(
    ("name", "words"),
    [("*.jpg", "matches no file"), ("none.jpg", "no such file"), ("empty", "--recursive")],
)
def test_names_that_lead_nowhere(cli: Cli, checkpoint: Path, name: str, words: str) -> None:
    Path("empty").mkdir()
    result = cli("predict", checkpoint, name)
    assert result.code == 2
    assert words in result.err
