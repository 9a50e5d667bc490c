"""Measure training on few images: the default rules, the recipe for COCO, and fine-tuning.

    python benchmarks/small_data.py --out DIR [--images 20,50,100,300] [--samples 1600] [--json]

Two styles of generated images: `solid` (ssdctl/data/shapes.py), and `hatched` with other classes,
one with the same name, and striped objects of any hue on dark images. A detector is trained on
`solid` by the demo's recipe. Then, for each number of `hatched` images and with the
same number of samples: from that detector, and from random weights, both by the default rules; and
from random weights by the recipe for COCO (`--preset stable-r34`). ResNet-18, no pretrained
backbone. Each run has a folder in DIR, so the same command continues after an interruption.

    python benchmarks/small_data.py --out DIR --background 0,0.5 [--images 400] [--seeds 0,1,2]

The same for images without objects: half of the images are `solid`, the others show shapes of no
class on the same backgrounds (`others`) and have no labels. Each share of --background trains on as
many images with objects. The result is the AP on the validation images with objects, and the boxes
with a score of 0.3 or more on each of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ssdctl.data.shapes import CLASSES, OUTLINES, STYLES, Pixels, ShapeClass, Style, generate

HATCHED_CLASSES = ("diamond", "cross", "moon", "star")
STYLES["hatched"] = Style(
    tuple(ShapeClass(n, name, 0.0) for n, name in enumerate(HATCHED_CLASSES, 1)),
    (0.05, 0.4),
    stray_hue_share=1.0,
    stripes=0.5,
)
# Shapes of no class, in the colors of the classes of `solid`.
STYLES["others"] = STYLES["solid"]._replace(
    classes=tuple(
        ShapeClass(n, name, CLASSES[n].hue)
        for n, name in enumerate(itertools.islice(itertools.cycle(HATCHED_CLASSES[:3]), 5))
    )
)
SEED = 1
FALSE_POSITIVE_SCORE = 0.3
NETWORK = ("--backbone", "resnet18", "--backbone-weights", "none")
DEMO = (
    "--augment none --optimizer adamw --weight-decay 0.01 --clip-grad 10 --bs 4 --lr 8e-3 "
    "--warmup 20st --lr-decay cosine --decay-epochs 0.2,1 --steps 260"
)


def cross(u: Pixels, v: Pixels) -> Pixels:
    bars = np.minimum(np.abs(u), np.abs(v)), np.maximum(np.abs(u), np.abs(v))
    return np.minimum(0.35 - bars[0], 1 - bars[1])


OUTLINES["diamond"] = lambda u, v: 1 - np.abs(u) - np.abs(v)
OUTLINES["cross"] = cross
# A disc without another disc.
OUTLINES["moon"] = lambda u, v: np.minimum(1 - np.hypot(u, v), np.hypot(u - 0.55, v) - 0.75)


def main() -> None:
    """Run all variants and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", default="20,50,100,300", help="training images of each point")
    parser.add_argument("--samples", type=int, default=1600, help="images trained on in each run")
    parser.add_argument("--val-images", type=int, default=60)
    parser.add_argument("--base", type=Path, help="fine-tune this checkpoint instead")
    parser.add_argument("--variants", default="tuned,random,recipe")
    parser.add_argument("--background", help="shares of images without objects to compare")
    parser.add_argument("--negatives", default="30", help="values of --background-negatives")
    parser.add_argument("--backbone", default="tiny", help="of these comparisons")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.background:
        compare_backgrounds(arguments)
    else:
        compare_variants(arguments)


def compare_variants(arguments: argparse.Namespace) -> None:
    base = arguments.base
    if base is None:
        solid = dataset(arguments.out / "solid", 1080, 100, 0, "solid")
        train(arguments.out / "base", "--data", str(solid), *NETWORK, *DEMO.split())
        base = arguments.out / "base" / "checkpoints" / "best.pt"
    rows = []
    for images in map(int, arguments.images.split(",")):
        folder = arguments.out / f"hatched-{images}"
        data = ("--data", str(dataset(folder, images, arguments.val_images, SEED, "hatched")))
        for variant in arguments.variants.split(","):
            run = arguments.out / f"{variant}-{images}"
            row = {"images": images, "variant": variant, **measure(run, variant, data, base,
                                                                   arguments.samples)}  # fmt: skip
            rows.append(row)
            if not arguments.json:
                print(json.dumps(row), flush=True)
    if arguments.json:
        print(json.dumps(rows))


def compare_backgrounds(arguments: argparse.Namespace) -> None:
    """Train with each share of images without objects, and print a row for each."""
    images = int(arguments.images.split(",")[0])
    folder = half_empty(arguments.out, images, arguments.val_images)
    epochs = max(round(arguments.samples / images), 1)
    choices = itertools.product(*(
        getattr(arguments, name).split(",") for name in ("seeds", "background", "negatives")
    ))  # fmt: skip
    for seed, share, negatives in choices:
        if float(share) == 0 and negatives != arguments.negatives.split(",")[0]:
            continue
        run = arguments.out / f"background-{share}-{negatives}-seed-{seed}"
        options = f"--backbone {arguments.backbone} --backbone-weights none --augment flip,color"
        options += f" --epochs {epochs} --seed {seed} --background {share} --eval-every {epochs}"
        if float(share):
            options += f" --background-negatives {negatives}"
        start = time.monotonic()
        train(run, "--data", str(folder), *options.split())
        seconds = round(time.monotonic() - start)
        row = {"seed": seed, "background": share, "negatives": negatives, "seconds": seconds}
        print(json.dumps(row | background_metrics(run, folder)), flush=True)


def half_empty(out: Path, images: int, val_images: int) -> Path:
    """Return a dataset with as many images of shapes of no class as of images with objects."""
    folder = dataset(out / f"half-empty-{images}", images, val_images, 0, "solid")
    others = dataset(out / f"others-{images}", images, val_images, 1, "others")
    for split in ("train2017", "val2017"):
        name = f"annotations/instances_{split}.json"
        content, added = (json.loads((root / name).read_text()) for root in (folder, others))
        for image in added["images"]:
            file = f"other-{image['file_name']}"
            target = folder / split / file
            if not target.exists():
                target.hardlink_to(others / split / image["file_name"])
                content["images"].append(image | {"file_name": file, "id": 10**6 + image["id"]})
        (folder / name).write_text(json.dumps(content))
    return folder


def background_metrics(run: Path, folder: Path) -> dict[str, float]:
    """Return the AP on images with objects, and the false positives on each of the others."""
    detections = run / "detections.json"
    ssdctl("evaluate", str(run), "--data", str(folder), "--detections", str(detections))
    scored = ssdctl("evaluate", str(detections), "--data", str(folder), "--annotated-only")
    truth = json.loads((folder / "annotations/instances_val2017.json").read_text())
    empty = {image["id"] for image in truth["images"]}
    empty -= {annotation["image_id"] for annotation in truth["annotations"]}
    found = [
        box["image_id"]
        for box in json.loads(detections.read_text())
        if box["score"] >= FALSE_POSITIVE_SCORE
    ]
    false_positives = sum(image in empty for image in found) / len(empty)
    return {"AP": scored["AP"], "false positives": round(false_positives, 3)}


def measure(
    run: Path, variant: str, data: tuple[str, ...], base: Path, samples: int
) -> dict[str, Any]:
    """Train one variant with as many samples in all of them."""
    options: tuple[str, ...]
    if variant == "tuned":
        options, batch = ("--init", str(base)), 8
    elif variant == "random":
        options, batch = NETWORK, 8
    else:  # the recipe at its own batch, with the schedule shortened to the run
        options, batch = (*NETWORK, "--preset", "stable-r34"), 32
    epochs = max(round(samples / int(data[1].rpartition("-")[2])), 1)
    decays: tuple[str, ...] = ()
    if variant == "recipe":
        decays = ("--decay-epochs", f"{0.66 * epochs:g},{0.83 * epochs:g}")
    start = time.monotonic()
    summary = train(run, *data, *options, *decays, "--epochs", str(epochs), "--bs", str(batch))
    return {
        "AP": summary["best_ap"],
        "steps": summary["step"],
        "seconds": round(time.monotonic() - start),
    }


def dataset(folder: Path, images: int, val_images: int, seed: int, style: str) -> Path:
    """Generate a dataset if it does not exist."""
    if not (folder / "annotations" / "instances_val2017.json").is_file():
        generate(folder, num_train=images, num_val=val_images, seed=seed, style=style)
    return folder


def train(run: Path, *options: str) -> dict[str, Any]:
    """Run `ssdctl train`, or the rest of it; return its summary."""
    return ssdctl("train", "--out", str(run), *options)


def ssdctl(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ssdctl", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


if __name__ == "__main__":
    main()
