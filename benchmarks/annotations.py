"""Read annotations of train2017's size with ssdctl and with pycocotools.

python benchmarks/annotations.py [--images 118287] [--boxes 860001] [--repeat 3]

The file is generated: it has as many images, boxes and bytes as COCO's instances_train2017.json,
and polygons. Each reading runs in a separate process; its time starts after the imports, its peak
is the peak memory of the whole process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

POLYGONS = 1000
POINTS = (9, 44)  # per polygon; on average they give COCO's 458 MB

SSDCTL = """
from pathlib import Path
from ssdctl.data.check import check
from ssdctl.data.formats import coco
from ssdctl.data.annotations import SplitFiles
path = Path(sys.argv[1])
begun = time.perf_counter()
annotations = coco.read_files({"train": SplitFiles([path.parent], path)})["train"]
read = time.perf_counter() - begun
checked = check(annotations)
count = len(checked.objects.labels)
"""
PYCOCOTOOLS = """
import contextlib, io
from pycocotools.coco import COCO
begun = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    annotations = COCO(sys.argv[1])
read = time.perf_counter() - begun
count = len(annotations.anns)
"""
MEASURED = """
import json, resource, sys, time
{reading}
seconds = time.perf_counter() - begun
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(dict(seconds=seconds, read=read, peak=peak, count=count)))
"""


def generate(path: Path, num_images: int, num_boxes: int, *, polygons: bool = True) -> None:
    """Write an annotation file of COCO's shape, or one with boxes only."""
    dice = random.Random(0)
    outlines = [
        ",".join(f"{dice.uniform(0, 640):.2f}" for _ in range(2 * dice.randint(*POINTS)))
        for _ in range(POLYGONS)
    ]
    with path.open("w") as file:
        file.write('{"info": {"year": 2017}, "licenses": [], "images": [')
        for i in range(num_images):
            file.write(
                f'{", " if i else ""}{{"license": 3, "file_name": "{i:012d}.jpg", "coco_url": '
                f'"http://images.cocodataset.org/train2017/{i:012d}.jpg", "height": 480, "width": '
                f'640, "date_captured": "2013-11-14 11:18:45", "flickr_url": '
                f'"http://farm9.staticflickr.com/8186/{i:010d}_37ce5aa8bf_z.jpg", "id": {i}}}'
            )
        file.write('], "annotations": [')
        for i in range(num_boxes):
            x, y = dice.uniform(0, 500), dice.uniform(0, 400)
            w, h = dice.uniform(1, 140), dice.uniform(1, 80)
            outline = f'"segmentation": [[{outlines[dice.randrange(POLYGONS)]}]], '
            file.write(
                f"{', ' if i else ''}{{{outline if polygons else ''}"
                f'"area": {w * h / 2:.4f}, "iscrowd": 0, "image_id": {dice.randrange(num_images)}, '
                f'"bbox": [{x:.2f},{y:.2f},{w:.2f},{h:.2f}], '
                f'"category_id": {dice.randint(1, 80)}, "id": {i}}}'
            )
        names = [{"supercategory": "thing", "id": i, "name": f"class {i}"} for i in range(1, 81)]
        file.write(f'], "categories": {json.dumps(names)}}}')


def measure(reading: str, path: Path) -> dict[str, float]:
    """Return the metrics of one reading in a separate process."""
    command = [sys.executable, "-c", MEASURED.format(reading=reading), str(path)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=118_287)
    parser.add_argument("--boxes", type=int, default=860_001)
    parser.add_argument("--repeat", type=int, default=3, help="runs of ssdctl; 1 of pycocotools")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "instances_train2017.json"
        generate(path, options.images, options.boxes)
        print(f"{options.images:,} images, {options.boxes:,} boxes, {path.stat().st_size:,} bytes")
        path.read_bytes()  # in the page cache for both
        other = measure(PYCOCOTOOLS, path)
        runs = [measure(SSDCTL, path) for _ in range(options.repeat)]
    assert {run["count"] for run in runs} == {other["count"]} == {options.boxes}
    ssdctl_s = statistics.median(run["seconds"] for run in runs)
    read = statistics.median(run["read"] for run in runs)
    peak = max(run["peak"] for run in runs)
    print(f"  pycocotools  {other['seconds']:6.2f} s  {other['peak'] / 1e9:.2f} GB peak")
    print(f"  ssdctl       {ssdctl_s:6.2f} s  {peak / 1e9:.2f} GB peak  ({read:.2f} s to read)")
    print(f"  {other['seconds'] / ssdctl_s:.1f} times as fast")


if __name__ == "__main__":
    main()
