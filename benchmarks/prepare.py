"""Time `ssdctl prepare`, and the start of training, on many small JPEGs.

python benchmarks/prepare.py [--images 118287] [--boxes-only] [--dir FOLDER] [--verify]

Images are 640 x 480 and some 3 KB each, hard links to 64 files, so that the work per image is
measured and not the disk. There are as many boxes per image as in COCO's train2017, or with
`--boxes-only` (no polygons) as in Open Images: `--images 1743042 --boxes-only` has its size. Each
command is a process of its own, timed from start to end, imports included.
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
from typing import NamedTuple

import numpy as np
from annotations import generate
from PIL import Image

COCO_BOXES_PER_IMAGE = 860_001 / 118_287
OPEN_IMAGES_BOXES_PER_IMAGE = 14_610_229 / 1_743_042
NUM_FILES = 64  # different ones
PACKED: dict[str, list[str]] = {"packed": [], "again, nothing changed": []}
INDEX = {"index only": ["--no-pack"], "index again, nothing changed": ["--no-pack"]}
VERIFY = {"index only, every image decoded": ["--no-pack", "--verify-images"]}
START = """
import json, sys, time
times, last = {}, (0.0, 0.0)
def lap(name):
    global last
    now = (time.perf_counter() - begun, time.process_time())
    times[name], last = [now[0] - last[0], now[1] - last[1]], now
begun = time.perf_counter()
from pathlib import Path
from ssdctl.data.open_dataset import open_dataset
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import TrainLoader
lap("imports")
root, step = Path(sys.argv[1]), int(sys.argv[2])
split = open_dataset(root, root / "prepared")["train"]
lap("open, files compared")
config = LoaderConfig(seed=0, batch_size=32, threads=2, max_boxes=split.most_boxes)
loader = TrainLoader(split, config)
loader.draw(32 * step, 1)
lap("an epoch's permutation")
next(loader.batches(step, step + 2))
lap("first batch")
print(json.dumps(times))
"""


def jpegs() -> list[bytes]:
    """Small JPEGs of 640 x 480."""
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(NUM_FILES):
        coarse = Image.fromarray(rng.integers(0, 255, (3, 4, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=10)
        encoded.append(buffer.getvalue())
    return encoded


def make_images(folder: Path, count: int) -> None:
    """Fill a folder with hard links to a few files; a file has at most 65,000 names on ext4."""
    folder.mkdir()
    contents = jpegs()
    sources: dict[int, Path] = {}
    for i in range(count):
        path = folder / f"{i:012d}.jpg"
        number = i % NUM_FILES
        if i // NUM_FILES % 30_000 == 0:
            path.write_bytes(contents[number])
            sources[number] = path
        else:
            os.link(sources[number], path)


class Timed(NamedTuple):
    """A finished command."""

    output: str
    seconds: float
    core_seconds: float  # all threads; depends less on other load than `seconds`
    peak: float  # memory in GB, pages of mapped files included


def run_timed(command: list[str]) -> Timed:
    """Run a command and measure it."""
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    seconds = time.perf_counter() - begun
    return Timed(output, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--boxes-only", action="store_true", help="no polygons, index only")
    parser.add_argument("--dir", help="where to put the dataset; it is removed afterwards")
    parser.add_argument("--verify", action="store_true", help="also decode every image")
    options = parser.parse_args()
    commands = (INDEX if options.boxes_only else PACKED | INDEX) | (
        VERIFY if options.verify else {}
    )
    count = options.images
    per_image = OPEN_IMAGES_BOXES_PER_IMAGE if options.boxes_only else COCO_BOXES_PER_IMAGE
    num_boxes = round(count * per_image)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        root = Path(folder)
        make_images(root / "train2017", count)
        (root / "annotations").mkdir()
        annotations = root / "annotations" / "instances_train2017.json"
        generate(annotations, count, num_boxes, polygons=not options.boxes_only)
        size = annotations.stat().st_size / 1e9
        print(
            f"{count:,} images, {num_boxes:,} boxes, {size:.2f} GB of JSON, {os.cpu_count()} cores"
        )
        program = "from ssdctl.__main__ import run; run()"
        for name, more in commands.items():
            done = run_timed(
                [sys.executable, "-c", program, "prepare", "--data", folder, "--json", "-q", *more]
            )
            assert json.loads(done.output)["unchanged"] == ("nothing changed" in name)
            print(
                f"  {name:<34}{done.seconds:7.1f} s {done.core_seconds:7.1f} core s "
                f"{count / done.seconds:8.0f} img/s  {done.peak:.2f} GB peak",
                flush=True,
            )
        for step in (0, 1_000_000):
            done = run_timed([sys.executable, "-c", START, folder, str(step)])
            print(f"  training from step {step:,}: {done.seconds:.1f} s, {done.peak:.2f} GB peak")
            laps = json.loads(done.output.splitlines()[-1])
            for name, (seconds, core_seconds) in laps.items():
                print(f"    {name:<38}{seconds:7.2f} s {core_seconds:7.2f} core s")


if __name__ == "__main__":
    main()
