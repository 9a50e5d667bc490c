"""Time `ssdctl prepare` on many small JPEGs.

python benchmarks/prepare.py [--images 118287] [--dir FOLDER] [--verify]

As many images and boxes as COCO's train2017 has, the pictures 640 x 480 and some 3 KB each, so that
what is measured is the work per image and not the disk. Each command is a process of its own, timed
from start to end, imports and all.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from annotations import generate
from PIL import Image

BOXES_PER_IMAGE = 860_001 / 118_287
PICTURES = 64  # different ones
COMMANDS = {
    "packed": [],
    "again, nothing changed": [],
    "index alone": ["--no-pack"],
}
VERIFY = {"index alone, every image decoded": ["--no-pack", "--verify-images"]}


def pictures() -> list[bytes]:
    """Small JPEGs of 640 x 480."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(PICTURES):
        coarse = Image.fromarray(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=10)
        found.append(buffer.getvalue())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--dir", help="where to put the dataset; it is removed afterwards")
    parser.add_argument("--verify", action="store_true", help="also decode every image")
    options = parser.parse_args()
    commands = COMMANDS | (VERIFY if options.verify else {})
    count = options.images
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        root = Path(folder)
        (root / "train2017").mkdir()
        (root / "annotations").mkdir()
        made = pictures()
        for i in range(count):
            (root / "train2017" / f"{i:012d}.jpg").write_bytes(made[i % PICTURES])
        annotations = root / "annotations" / "instances_train2017.json"
        generate(annotations, count, round(count * BOXES_PER_IMAGE))
        size = sum(map(len, made)) / PICTURES
        print(f"{count:,} images of {size / 1e3:.1f} KB, {os.cpu_count()} cores")
        run = "from ssdctl.__main__ import run; run()"
        for name, more in commands.items():
            command = [
                sys.executable,
                "-c",
                run,
                "prepare",
                "--data",
                folder,
                "--json",
                "-q",
                *more,
            ]
            begun = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                said = process.stdout.read()
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.perf_counter() - begun
            assert process.returncode == 0, said
            assert json.loads(said)["unchanged"] == (name == "again, nothing changed")
            rate, peak = count / seconds, usage.ru_maxrss * 1024 / 1e9
            print(f"  {name:<34}{seconds:7.1f} s {rate:8.0f} img/s  {peak:.2f} GB peak")


if __name__ == "__main__":
    main()
