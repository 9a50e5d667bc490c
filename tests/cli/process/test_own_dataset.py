"""A hand-made dataset with its own class names and ids works without options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from conftest import Cli
from PIL import Image

CATEGORIES = [{"id": 90, "name": "bolt"}, {"id": 17, "name": "nut, 3 mm"}, {"id": 3, "name": "Öse"}]


def make(folder: Path, images: str, annotations: Path, count: int, suffix: str) -> None:
    """Noise with a bright block per annotation."""
    rng = np.random.default_rng(count)
    listed, boxes = [], []
    (folder / images).mkdir(parents=True)
    for i in range(count):
        name, height, x, y = f"shot {i}{suffix}", 120 + 10 * i, 10 + 5 * i, 20
        pixels = rng.integers(0, 80, (height, 160, 3), dtype=np.uint8)
        pixels[y : y + 40, x : x + 50] = 200
        Image.fromarray(pixels).save(folder / images / name)
        image = {"id": 1000 + 7 * i, "file_name": name, "width": 160, "height": height}
        listed.append(image)
        box = {"id": i, "image_id": image["id"], "category_id": CATEGORIES[i % 3]["id"]}
        boxes.append({**box, "bbox": [x, y, 50, 40], "area": 2000, "iscrowd": 0})
    annotations.parent.mkdir(exist_ok=True)
    document = {"images": listed, "annotations": boxes, "categories": CATEGORIES}
    annotations.write_text(json.dumps(document))


def trained(cli: Cli, root: Path) -> str:
    options = "--backbone tiny --backbone-weights none --steps 2 --warmup 1st --bs 2 --device cpu"
    result = cli("train", "--data", root, "--out", root / "run", *options.split())
    assert result.code == 0, result.err
    return result.err


def test_coco_layout(tmp_path: Path, cli: Cli) -> None:
    root = tmp_path / "parts"
    for split, count in (("train", 6), ("val", 3)):
        make(root, f"{split}2017", root / f"annotations/instances_{split}2017.json", count, ".png")
    assert "not prepared yet" in trained(cli, root)
    detections_file = tmp_path / "found.json"
    options = ["--score-threshold", 0.01, "--device", "cpu", "--json"]
    options += ["--detections", detections_file]
    result = cli("evaluate", root / "run/checkpoints/last.pt", *options)
    assert result.code == 0, result.err
    assert [c["name"] for c in json.loads(result.out)["per_class"]] == ["Öse", "nut, 3 mm", "bolt"]
    assert {d["category_id"] for d in json.loads(detections_file.read_text())} <= {3, 17, 90}


def test_dataset_toml_without_validation(tmp_path: Path, cli: Cli) -> None:
    root = tmp_path / "mine"
    make(root, "photos", root / "labels.json", 4, ".jpg")
    (root / "dataset.toml").write_text('[train]\nimages = "photos"\nannotations = "labels.json"\n')
    remedy = f"ssdctl prepare --data {root} --split"
    for message in (
        cli("train", "--data", root, "--dry-run").err,
        cli("prepare", "--data", root).err,
        trained(cli, root),
    ):
        assert "no validation split" in message
        assert remedy in message
    result = cli("evaluate", root / "run/checkpoints/last.pt", "--device", "cpu")
    assert result.code == 3
    assert "has no split val" in result.err
