"""Train on a dataset of small objects with and without tiles for the same minutes; compare the AP.

    python benchmarks/tiles.py DATASET --out DIR [--tile PX] [--background FRACTION]
        [--minutes 15] --epochs WHOLE TILES [OPTIONS OF `ssdctl train`]

DATASET is prepared and has a validation split. Without --tile, the size is the one that `prepare`
recommends; --background is the share of tiles without objects. Both runs start from random weights,
take the recipe for few images, are evaluated five times and train at the same time, each on half of
the processor's cores; each stops at the time limit. The AP of each is that of its best checkpoint
on whole images (`ssdctl evaluate RUN`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SSDCTL = (sys.executable, "-m", "ssdctl")
EVALUATIONS = 5


def output(*command: object) -> Any:
    arguments = [*SSDCTL, *map(str, command), "--json"]
    return json.loads(subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tile", type=int)
    parser.add_argument("--background", type=float)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--epochs", type=int, nargs=2, metavar=("WHOLE", "TILES"), required=True)
    options, train = parser.parse_known_args()
    data = ("--data", options.dataset)
    sizes = output("prepare", *data)["splits"][0]["object_sizes"]
    tile = options.tile or sizes["fitting_tile"]
    print(
        f"{sizes['unmatched_share']:.0%} of the boxes match no default box; tiles of {tile} pixels"
    )
    model = ("--backbone", options.backbone, "--backbone-weights", "none", "--device", "cpu")
    runs = {"whole": [], "tiles": ["--tile", tile]}
    if options.background is not None:
        runs["tiles"] += ["--background", options.background]
    all_cores = sorted(os.sched_getaffinity(0))
    half = max(len(all_cores) // 2, 1)
    started = []
    for (name, extra), epochs, cores in zip(
        runs.items(), options.epochs, (all_cores[:half], all_cores[-half:]), strict=True
    ):
        length = ("--epochs", epochs, "--val-interval", max(epochs // EVALUATIONS, 1))
        command = ("train", *data, *model, *extra, *length, *train)
        os.sched_setaffinity(0, cores)  # a process that it starts has them, too
        started.append(subprocess.Popen([*SSDCTL, *map(str, command), "--out", options.out / name]))
    os.sched_setaffinity(0, all_cores)
    end = time.monotonic() + 60 * options.minutes
    for process in started:
        try:
            process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # saves; `evaluate` takes the best checkpoint
            process.wait()
    print("| images | AP | AP50 | epoch |\n|---|---|---|---|")
    for name in runs:
        found = output("evaluate", options.out / name)
        print(f"| {name} | {found['AP']:.3f} | {found['AP50']:.3f} | {found['epoch']:.1f} |")


if __name__ == "__main__":
    main()
