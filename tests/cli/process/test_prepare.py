"""`ssdctl prepare` as users type it, and own datasets from the annotations to a score."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_RUN, Cli
from data.formats import exports
from PIL import Image


def test_a_dataset_without_validation(dataset: Path, cli: Cli) -> None:
    (dataset / "dataset.toml").write_text(
        '[train]\nimages = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
    )
    train = ("train", "--data", dataset, "--out", "run", "--steps", 1, *TINY_RUN.split())
    for command in ((*train, "--dry-run"), ("prepare", "--data", dataset), train):
        cli(*command).expect(0, "no validation split", f"ssdctl prepare --data {dataset} --split")
    cli("evaluate", "run/checkpoints/last.pt", "--device", "cpu").expect(3, "has no split val")
    shrink = ("--shrink", 300)
    assert cli("prepare", "--data", dataset, "--store", "s", "--classes", "ball", *shrink).code == 0
    advised = f"ssdctl prepare --data {dataset} --store s --shrink 300 --split 0.9"
    assert advised in cli("train", "--data", dataset, "--store", "s", "--dry-run").err
    assert cli(*advised.split()[1:]).code == 0  # the index remembers --classes
    assert cli("train", "--data", dataset, "--store", "s", "--dry-run").out.count("1 class: ball")
    files = {"images/a.jpg": None, "labels/a.txt": "0 .5 .5 .2 .2"}
    exports.tree(Path("one"), {"data.yaml": "train: images\nnames: [x]", **files})
    for command in (
        ("prepare",),
        ("train", "--dry-run"),
        ("train", "--steps", 1, *TINY_RUN.split()),
    ):
        result = cli(*command, "--data", "one").expect(0, "no validation split")
        assert "--split" not in result.err  # one image cannot be divided
    path = dataset / "annotations/instances_val2017.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "annotations": []}))
    Path("found.json").write_text("[]")
    cli("evaluate", "found.json", "--data", path, "--annotated-only").expect(3, "no image to score")


def test_preview_shows_annotated_and_augmented_images(dataset: Path, cli: Cli) -> None:
    image = dataset / "train2017/000000000001.jpg"
    wide = Image.new("RGB", (1260, 9))
    wide.save("wide.png")
    refused = {"boxes.pdf": ".png", image: "earlier", "wide.png": "earlier"}
    refused[image.with_name("boxes.png")] = "in the dataset"
    for target, reason in refused.items():
        cli("prepare", "--data", dataset, "--preview", target).expect(2, reason)
    assert not (dataset / "prepared").exists()
    options = ("--preview", "boxes.JPG", "--shrink", 300, "--encoding", "raw")
    cli("prepare", "--data", dataset, *options).expect(0, "GB")
    for name in ("boxes.JPG", "boxes.png", "boxes.png"):  # its own file is replaced
        assert cli("prepare", "--data", dataset, "--preview", name, *options[2:]).code == 0
    with Image.open("boxes.JPG") as drawn:
        assert drawn.width == 12 + 4 * 312
        pixels = np.asarray(drawn.convert("RGB"), np.int16)
    tiles = [pixels[60:330, 12 + 312 * i : 12 + 312 * i + 290] for i in range(4)]
    for tile in tiles:
        assert tile.std() > 10
    assert np.abs(tiles[1] - tiles[2]).mean() > 1  # each epoch has its own colors


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_75(dataset: Path, sent: signal.Signals) -> None:
    program = """
import time
from ssdctl.data import image_check
check = image_check.check_image
def slow(*given):
    time.sleep(0.05)
    return check(*given)
image_check.check_image, image_check.TASK_IMAGES = slow, 1
print("go", flush=True)
from ssdctl.cli.main import main
main()
"""
    command = [sys.executable, "-c", program, "prepare", "--data", str(dataset), "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lock = dataset / "prepared/.lock"
    while not lock.exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    process.send_signal(sent)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 75, err
    assert "run the same command again" in err
    assert [p.name for p in (dataset / "prepared").iterdir()] == [".lock"]
