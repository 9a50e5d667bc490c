"""Boxes become fractions of their image by one correctly rounded quotient."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from ssdctl.data.prepare import prepare
from ssdctl.data.store import open_split


def nearest_float32(value: Fraction) -> np.float32:
    """Round an exact value to the nearest float32, by comparing its neighbors exactly."""
    guess = np.float32(float(value))
    around = (np.nextafter(guess, np.float32(0)), guess, np.nextafter(guess, np.float32(2)))
    return min(around, key=lambda candidate: abs(Fraction(float(candidate)) - value))


def test_fractions_equal_exact_arithmetic(tmp_path: Path) -> None:
    rng = random.Random(0)
    images, annotations = [], []
    (tmp_path / "train2017").mkdir()
    for image_id in range(1, 21):
        width, height = rng.randint(20, 700), rng.randint(20, 99)
        images.append(
            {"id": image_id, "file_name": f"{image_id}.png", "width": width, "height": height}
        )
        Image.new("L", (width, height)).save(tmp_path / f"train2017/{image_id}.png")
        for _ in range(50):
            left, top = rng.uniform(0, width - 3), rng.uniform(0, height - 3)
            box = [left, top, rng.uniform(1, width - left), rng.uniform(1, height - top)]
            bbox = [round(v, rng.choice([0, 1, 2, 2, 6])) for v in box]
            entry = {"image_id": image_id, "category_id": 1, "bbox": bbox, "iscrowd": 0}
            annotations.append(entry | {"id": len(annotations) + 1, "area": 1.0})
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations/instances_train2017.json").write_text(
        json.dumps(
            {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "x"}]}
        )
    )
    prepare(tmp_path, tmp_path / "store", pack=False)
    split = open_split(tmp_path, tmp_path / "store", "train")
    boxes = iter(split.boxes.tolist())
    unclipped = pa.ipc.open_file(str(split.index_file)).read_all()["boxes"]
    for row, image in enumerate(images):
        size = (image["width"], image["height"])
        entries = [a for a in annotations if a["image_id"] == image["id"]]
        assert split.starts[row + 1] - split.starts[row] == len(entries)
        for entry, in_index in zip(entries, unclipped[row].as_py(), strict=True):
            low = [Fraction(v) for v in entry["bbox"][:2]]
            high = [a + Fraction(v) for a, v in zip(low, entry["bbox"][2:], strict=True)]
            high = [min(v, Fraction(side)) for v, side in zip(high, size, strict=True)]
            exact = [v / side for v, side in zip([*low, *high], (*size, *size), strict=True)]
            assert next(boxes) == [float(nearest_float32(v)) for v in exact]
            assert in_index == entry["bbox"]
