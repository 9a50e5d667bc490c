"""Train ssdctl and ultralytics' yolo11n on a dataset for the same minutes; compare their AP.

    uv venv ULTRA && uv pip install --python ULTRA/bin/python ultralytics
    python benchmarks/equal_time.py DATASET --out DIR --ultralytics-python ULTRA/bin/python
    python benchmarks/equal_time.py ... --minutes 5 --together

DATASET is a folder that `ssdctl prepare` recognizes, with a training and a validation split. Both
start from random weights and use their own defaults, each in its own processes: `ssdctl train
--backbone-weights none`, and ultralytics' `YOLO("yolo11n.yaml").train(...)`, whose `time` sets its
length; it runs on all cores (its default leaves one out). Both score the validation images while
they train and keep their best weights, so that time is part of the minutes. pycocotools then scores
the detections of the best weights on the validation images: down to a score of 0.001 for yolo11n,
to the default of `evaluate` for ssdctl.

Without --minutes, ssdctl trains as long as its own rule says; with them, a trial of 15 steps tells
how many of its epochs fit. yolo11n then gets the time that ssdctl took. --together trains both at
the same time, so that the changing load of a shared machine affects both alike.

The table has the wall and CPU time of each, since on a busy machine they differ. Ultralytics is
AGPL: it runs in its own environment, and nothing of it is imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from ssdctl.data.coco_json import coco_document
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.evaluation.coco_ap import read_ground_truth

SSDCTL = (sys.executable, "-m", "ssdctl")
TRIAL_STEPS = 15
TRIAL_SHARE = 0.85  # fraction of the minutes; start-up and evaluations need the rest
TOGETHER = 0.5  # fraction of the speed if the other program runs at the same time
YOLO_TRAIN = """
import os, sys
from ultralytics import YOLO
from ultralytics.utils import torch_utils
torch_utils.NUM_THREADS = len(os.sched_getaffinity(0))  # its default leaves a core unused
data, hours, project = sys.argv[1:]
YOLO("yolo11n.yaml").train(
    data=data, time=float(hours), device="cpu", pretrained=False, project=project, name="run",
    exist_ok=True, plots=False,
)
"""
YOLO_DETECT = """
import json, sys
from pathlib import Path
from ultralytics import YOLO
weights, folder, ids, out = sys.argv[1:]
model, ids, rows = YOLO(weights), json.loads(ids), []
settings = {"conf": 0.001, "iou": 0.7, "max_det": 300, "device": "cpu", "verbose": False}
for path in sorted(Path(folder).iterdir()):
    found = model.predict(path, **settings)[0].boxes
    for box, score, label in zip(found.xyxy.tolist(), found.conf.tolist(), found.cls.tolist()):
        x1, y1, x2, y2 = box
        rows.append({"image_id": int(path.stem), "category_id": ids[int(label)], "score": score,
                     "bbox": [x1, y1, x2 - x1, y2 - y1]})
json.dump(rows, open(out, "w"))
"""


class Cost(NamedTuple):
    """What a training took."""

    wall_s: float
    cpu_s: float
    load: float  # mean of the load averages before and after


class Result(NamedTuple):
    """The cost and the scores of one program."""

    name: str
    cost: Cost
    ap: float
    ap50: float
    trained: str  # steps or epochs


def main() -> None:
    """Train both, score both, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs; not reused")
    parser.add_argument("--ultralytics-python", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--together", action="store_true", help="train both at the same time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.together and options.minutes is None:
        parser.error("--together needs --minutes")
    options.out.mkdir(parents=True)
    python = str(options.ultralytics_python.absolute())
    splits = open_dataset(options.dataset, options.dataset / "prepared")
    data = write_yolo(splits, options.out / "yolo")

    length: list[str] = []
    if options.minutes is not None:
        train = splits["train"]  # the rule takes at most as many images without objects
        num_images = len(train.trainable) + min(len(train.trainable), len(train.background))
        epochs = affordable_epochs(options, num_images)
        length = ["--epochs", str(epochs)]
    ours = [*SSDCTL, "train", "--data", str(options.dataset), "--out", str(options.out / "ssdctl"),
            "--backbone-weights", "none", "--device", "cpu", "--json", *length]  # fmt: skip

    def train_yolo(minutes: float) -> Cost:
        run = str(options.out.absolute() / "ultralytics")
        command = [python, "-c", YOLO_TRAIN, str(data), str(minutes / 60), run]
        return timed(command, options.out / "ultralytics.log")

    if options.together:
        with ThreadPoolExecutor(2) as pool:
            futures = (
                pool.submit(timed, ours, options.out / "ssdctl.log"),
                pool.submit(train_yolo, options.minutes),
            )
            costs = [future.result() for future in futures]
    else:
        first = timed(ours, options.out / "ssdctl.log")
        costs = [first, train_yolo(first.wall_s / 60)]

    results = [
        score_ssdctl(options, splits["val"], costs[0]),
        score_yolo(options, python, splits["val"], costs[1]),
    ]
    show(options, splits, results)


def affordable_epochs(options: argparse.Namespace, images: int) -> int:
    """Return how many epochs of ssdctl fit into the minutes, by the speed of a short trial."""
    trial = [*SSDCTL, "train", "--data", str(options.dataset), "--out", str(options.out / "trial"),
             "--backbone-weights", "none", "--device", "cpu", "--steps", str(TRIAL_STEPS),
             "--eval-every", "1000st", "--json"]  # fmt: skip
    done = subprocess.run(trial, check=True, stdout=subprocess.PIPE, text=True)
    rate = float(json.loads(done.stdout)["images_per_second"])
    share = TRIAL_SHARE * (TOGETHER if options.together else 1)
    return max(round(options.minutes * 60 * share * rate / images), 1)


def timed(command: list[str], log: Path) -> Cost:
    """Run a program in a session of its own; its output goes to a file.

    Linux gives each session the same share of a busy machine (sched_autogroup).
    """
    before, start = os.getloadavg()[0], time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, "YOLO_CONFIG_DIR": str(log.parent.absolute()), "YOLO_OFFLINE": "1"},
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}; see {log}")
    return Cost(
        time.monotonic() - start,
        usage.ru_utime + usage.ru_stime,
        (before + os.getloadavg()[0]) / 2,
    )


def write_yolo(splits: dict[str, Split], folder: Path) -> Path:
    """Write images, labels and data.yaml as ultralytics reads them; return data.yaml."""
    for name in ("train", "val"):
        split = splits[name]
        images, labels = folder / "images" / name, folder / "labels" / name
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for row, image_id in enumerate(split.image_ids.tolist()):
            if not split.usable[row]:
                continue
            content = bytes(split.read(row))
            kind = Image.open(io.BytesIO(content)).format
            suffix = {"JPEG": "jpg", "PNG": "png"}.get(str(kind))
            if suffix is None:
                Image.fromarray(split.decode(row)).save(images / f"{image_id}.png")
            else:
                (images / f"{image_id}.{suffix}").write_bytes(content)
            span = slice(split.starts[row], split.starts[row + 1])
            lines = [
                f"{label - 1} {(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}\n"
                for label, (x1, y1, x2, y2) in zip(
                    split.labels[span].tolist(), split.boxes[span].tolist(), strict=True
                )
            ]
            (labels / f"{image_id}.txt").write_text("".join(lines))
    data = {
        "path": str(folder.absolute()),
        "train": "images/train",
        "val": "images/val",
        "names": {i: c.name for i, c in enumerate(splits["train"].classes)},
    }
    (folder / "data.yaml").write_text(json.dumps(data))  # JSON is YAML
    return (folder / "data.yaml").absolute()


def score_ssdctl(options: argparse.Namespace, val: Split, cost: Cost) -> Result:
    """Detect with ssdctl's best checkpoint; return its score."""
    run, detections = options.out / "ssdctl", options.out / "ssdctl.json"
    subprocess.run(
        [*SSDCTL, "evaluate", str(run / "checkpoints" / "best.pt"), "--data", str(options.dataset),
         "--device", "cpu", "--detections", str(detections)],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    lines = (options.out / "ssdctl.log").read_text().splitlines()
    summary = json.loads(next(line for line in lines if line.startswith("{")))
    return Result("ssdctl", cost, *score(val, detections), f"{summary['step']} steps")


def score_yolo(options: argparse.Namespace, python: str, val: Split, cost: Cost) -> Result:
    """Detect with ultralytics' best weights; return their score."""
    weights = options.out / "ultralytics" / "run" / "weights" / "best.pt"
    detections = options.out / "ultralytics.json"
    ids = json.dumps([c.id for c in val.classes])
    timed(
        [python, "-c", YOLO_DETECT, str(weights.absolute()),
         str(options.out / "yolo" / "images" / "val"), ids, str(detections)],
        options.out / "ultralytics-detect.log",
    )  # fmt: skip
    rows = (options.out / "ultralytics" / "run" / "results.csv").read_text().splitlines()
    return Result("ultralytics yolo11n", cost, *score(val, detections), f"{len(rows) - 1} epochs")


def score(val: Split, detections: Path) -> tuple[float, float]:
    """Return AP and AP50 by pycocotools; 0 without a detection."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not json.loads(detections.read_text()):
        return 0.0, 0.0
    found = read_ground_truth(val.index_file)
    sizes = found.sizes.tolist()
    images = [(i, "", *size) for i, size in zip(found.image_ids.tolist(), sizes, strict=True)]
    columns = (found.object_image_ids, found.object_category_ids, found.boxes, found.areas)
    objects = zip(*(c.tolist() for c in columns), found.is_crowd.astype(int).tolist(), strict=True)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = coco_document(images, [(c.id, c.name) for c in val.classes], objects)
        truth.createIndex()
        scoring = COCOeval(truth, truth.loadRes(str(detections)), "bbox")
        scoring.evaluate()
        scoring.accumulate()
        scoring.summarize()
    return float(scoring.stats[0]), float(scoring.stats[1])


def show(options: argparse.Namespace, splits: dict[str, Split], results: list[Result]) -> None:
    """Print the conditions and a row for each program."""
    train, val = splits["train"], splits["val"]
    facts: dict[str, Any] = {
        "dataset": options.dataset.name,
        "train_images": len(train.image_ids),
        "val_images": len(val.image_ids),
        "classes": len(train.classes),
        "cores": len(os.sched_getaffinity(0)),
        "together": options.together,
    }
    if options.json:
        rows = [{**result._asdict(), "cost": result.cost._asdict()} for result in results]
        print(json.dumps({**facts, "results": rows}))
        return
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(
        f"{'from random weights':<22}{'AP':>7}{'AP50':>7}{'wall s':>8}{'CPU s':>8}{'load':>6}"
        "  trained"
    )
    for name, cost, ap, ap50, trained in results:
        print(f"{name:<22}{ap:>7.3f}{ap50:>7.3f}{cost.wall_s:>8.0f}{cost.cpu_s:>8.0f}"
              f"{cost.load:>6.1f}  {trained}")  # fmt: skip


if __name__ == "__main__":
    main()
