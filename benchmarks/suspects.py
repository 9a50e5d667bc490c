"""Measure how many damaged labels `evaluate --suspects` finds.

    python benchmarks/suspects.py --out DIR [--data COCO_DIR] [--share 0.05] [-- TRAIN OPTIONS]

Of the objects of each split, a share gets another class and a share loses its box. A detector is
trained on the damaged training images, and its checkpoints name the suspects of the damaged
validation images. The result is how many of the first hundred are the damage. By default the images
are generated (`ssdctl download --dataset shapes`); --data names a dataset folder in COCO's layout
instead, whose annotations are copied. The same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

TRAIN = (
    "--backbone resnet18 --backbone-weights none --augment none --optimizer adamw "
    "--weight-decay 0.01 --clip-grad 10 --bs 2 --lr 8e-3 --warmup 20st --lr-decay cosine "
    "--decay-epochs 0.2,1 --epochs 1 --eval-every 0.25ep --save-every 0.25ep"
)
FIRST = 100
MIN_IOU = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="a dataset folder in COCO's layout")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--images", default="600,300", help="generated images to train and check")
    parser.add_argument("train", nargs="*", help="options of `ssdctl train`, after --")
    options = parser.parse_args()
    data, run = options.out / "damaged", options.out / "run"
    clean = options.data
    if clean is None:
        clean = options.out / "clean"
        train, val = options.images.split(",")
        sizes = ("--images", train, "--val-images", val)
        ssdctl("download", "--dataset", "shapes", "--dest", str(clean), *sizes)
    if not data.exists():
        damage_dataset(clean, data, options.share)
    ssdctl("train", "--data", str(data), "--out", str(run), *(options.train or TRAIN.split()))
    found = options.out / "suspects.csv"
    ssdctl("evaluate", str(run), "--suspects", str(found))
    report(found, json.loads((data / "damage.json").read_text()))


def ssdctl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ssdctl", *arguments], check=True)


def damage_dataset(clean: Path, data: Path, share: float) -> None:
    """Write a dataset with links to the images of another one and damaged annotations."""
    partial = data.with_name(data.name + ".partial")
    (partial / "annotations").mkdir(parents=True, exist_ok=True)
    damages = []
    for split in ("train", "val"):
        name = f"instances_{split}2017.json"
        document = json.loads((clean / "annotations" / name).read_text())
        damage = damage_annotations(document, share)
        (partial / "annotations" / name).write_text(json.dumps(document))
        link = partial / f"{split}2017"
        if not link.exists():
            link.symlink_to((clean / f"{split}2017").absolute())
        if split == "val":
            damages = damage
    (partial / "damage.json").write_text(json.dumps(damages))
    partial.rename(data)


def damage_annotations(document: dict[str, Any], share: float) -> list[dict[str, Any]]:
    """Change the classes of a share of the objects, remove another share; return the damage."""
    rng = np.random.default_rng(0)
    objects = document["annotations"]
    names = {image["id"]: image["file_name"] for image in document["images"]}
    classes = [category["id"] for category in document["categories"]]
    count = round(share * len(objects))
    chosen = rng.choice(len(objects), 2 * count, replace=False)
    damage = []
    for place, row in enumerate(chosen.tolist()):
        entry = objects[row]
        is_flip = place < count and len(classes) > 1
        kind = "class" if is_flip else "removed"
        damage.append({"image": names[entry["image_id"]], "box": entry["bbox"], "kind": kind})
        if is_flip:
            others = [c for c in classes if c != entry["category_id"]]
            entry["category_id"] = int(rng.choice(others))
    removed = set(chosen[[d["kind"] == "removed" for d in damage]].tolist())
    document["annotations"] = [o for n, o in enumerate(objects) if n not in removed]
    return damage


def report(found: Path, damage: list[dict[str, Any]]) -> None:
    with found.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))[:FIRST]
    hits, by_kind = 0, dict.fromkeys(("class", "removed"), 0)
    left = list(damage)
    for row in rows:
        box = [float(row[name]) for name in ("left", "top", "width", "height")]
        same = [d for d in left if d["image"] == row["file"] and iou(box, d["box"]) >= MIN_IOU]
        if same:
            left.remove(same[0])
            hits += 1
            by_kind[same[0]["kind"]] += 1
    total = {kind: sum(d["kind"] == kind for d in damage) for kind in by_kind}
    print(f"{hits} of the first {len(rows)} suspects are damage: "
          f"{by_kind['class']} of {total['class']} changed classes, "
          f"{by_kind['removed']} of {total['removed']} removed boxes")  # fmt: skip


def iou(a: list[float], b: list[float]) -> float:
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    overlap = max(width, 0) * max(height, 0)
    return overlap / (a[2] * a[3] + b[2] * b[3] - overlap)


if __name__ == "__main__":
    main()
