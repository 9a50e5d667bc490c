"""Measure training on few images: the default rules, the recipe for COCO, and fine-tuning.

    python benchmarks/small_data.py --out DIR [--images 20,50,100,300] [--samples 1600] [--json]

Two styles of generated images: `solid` (ssdctl/data/shapes.py), and `hatched` with other classes,
one with the same name, and striped objects of any hue on dark images. A detector is trained on
`solid` by the demo's recipe. Then, for each number of `hatched` images and with the
same number of samples: from that detector, and from random weights, both by the default rules; and
from random weights by the recipe for COCO (`--preset stable-r34`). ResNet-18, no pretrained
backbone. Each run has a folder in DIR, so the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ssdctl.data.shapes import OUTLINES, STYLES, Pixels, ShapeClass, Style, generate

HATCHED_CLASSES = ("diamond", "cross", "moon", "star")
STYLES["hatched"] = Style(
    tuple(ShapeClass(n, name, 0.0) for n, name in enumerate(HATCHED_CLASSES, 1)),
    (0.05, 0.4),
    stray_hue_share=1.0,
    stripes=0.5,
)
SEED = 1
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
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
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
    command = [sys.executable, "-m", "ssdctl", "train", "--out", str(run), "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


if __name__ == "__main__":
    main()
