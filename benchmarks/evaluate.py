"""Measure scoring at COCO's size by ssdctl and by pycocotools, and detection.

    python benchmarks/evaluate.py [--seconds 5] [--skip-pycocotools]

The input is synthetic: 5,000 images with 36,781 boxes of 80 classes and 554,000 detections, in
COCO's files. Each program reads them in a separate process; the 12 metrics of both must be equal.
Then detection (softmax, decoding, NMS) is measured on network outputs of batch 8.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from ssdctl.benchmark.evaluate import make_split
from ssdctl.data.coco_json import document_of
from ssdctl.evaluation.coco_ap import read_detections, run_scoring

PYCOCOTOOLS = """
import contextlib, io, json, sys, time
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
start = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    truth = COCO(sys.argv[1])
    detections = truth.loadRes(sys.argv[2])
    loaded = time.perf_counter()
    scoring = COCOeval(truth, detections, "bbox")
    scoring.evaluate(); scoring.accumulate(); scoring.summarize()
print(json.dumps([loaded - start, time.perf_counter() - loaded, scoring.stats.tolist()]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--skip-pycocotools", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdctl-benchmark-") as name:
        score_both(Path(name), skip=options.skip_pycocotools)
    detect(options.seconds)


def score_both(folder: Path, *, skip: bool) -> None:
    """Measure both programs as processes, and the scoring of ssdctl in this process."""
    (folder / "annotations").mkdir()
    (folder / "val2017").mkdir()
    annotations = folder / "annotations" / "instances_val2017.json"
    results = folder / "detections.json"
    truth, found = make_split()
    annotations.write_bytes(msgspec.json.encode(document_of(truth)))
    results.write_bytes(msgspec.json.encode(found.to_coco()))

    detections = read_detections(results)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        scoring = run_scoring(truth, detections)
        times.append(time.perf_counter() - start)
        del scoring
    print(f"ssdctl: scoring {min(times):.2f} s, best of 5 ({len(detections.scores)} detections)")

    command = [sys.executable, "-m", "ssdctl", "evaluate", str(results), "--data", str(folder)]
    ssdctl_s, words = timed([*command, "--json", "--quiet"])
    print(f"ssdctl: whole process {ssdctl_s:.2f} s, error analysis included")
    if skip:
        return
    other_s, answer = timed([sys.executable, "-c", PYCOCOTOOLS, str(annotations), str(results)])
    load_s, score_s, stats = json.loads(answer)
    print(
        f"pycocotools: load {load_s:.2f} s, scoring {score_s:.2f} s, whole process {other_s:.2f} s"
    )
    print(f"ratio of the processes {other_s / ssdctl_s:.1f}, scoring {score_s / min(times):.0f}")
    metrics = json.loads(words)
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl",
             "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")  # fmt: skip
    gap = max(abs(metrics[n] - s) for n, s in zip(names, stats, strict=True))
    print(f"largest difference of the 12 metrics {gap:.1g}; AP {metrics['AP']:.4f}")


def timed(command: list[str]) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout


def detect(seconds: float) -> None:
    from ssdctl.benchmark.evaluate import detect_rate
    from ssdctl.device import open_device

    print(f"detection, network excluded: {detect_rate(open_device('cpu'), 81, seconds):.0f} img/s")


if __name__ == "__main__":
    main()
