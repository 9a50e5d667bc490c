"""Train ssdctl and ultralytics' yolo11n on a dataset for the same minutes; compare their AP.

    uv venv ULTRA && uv pip install --python ULTRA/bin/python ultralytics
    python benchmarks/equal_time.py DATASET --out DIR --ultralytics-python ULTRA/bin/python
    python benchmarks/equal_time.py ... --minutes 5 --together
    python benchmarks/equal_time.py BCCD RACCOON CARDS --curve --out DIR --ultralytics-python ...

DATASET is a folder that `ssdctl prepare` recognizes, with a training and a validation split. Both
start from random weights and use their own defaults, each in its own processes: `ssdctl train
--backbone-weights none`, and ultralytics' `YOLO("yolo11n.yaml").train(...)`, whose `time` sets its
length; it runs on all cores (its default leaves one out). Both score the validation images while
they train and keep their best weights, so that time is part of the minutes. pycocotools then scores
the detections of the best weights on the validation images: down to a score of 0.001 for yolo11n,
to the default of `evaluate` for ssdctl.

Without --minutes, ssdctl trains as long as its own rule says; with them, a trial of 15 steps tells
how many of its epochs fit. yolo11n then gets the time that ssdctl took. --together trains both at
the same time, each on its own half of the cores, so that the changing load of a shared machine
affects both alike.

--curve gives both 45 minutes, or --minutes, saves their weights as they train and scores up to 15
of each: DIR/DATASET/curve.json, and the pictures DIR/curve-light.webp and curve-dark.webp with a
panel for each dataset. A dataset that has a curve.json is only drawn again. It needs 3 GB of disk
for each dataset, and a machine without other work.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ssdctl.data.coco_json import coco_document
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.evaluation.coco_ap import read_ground_truth

SSDCTL = (sys.executable, "-m", "ssdctl")
TRIAL_STEPS = 15
TRIAL_SHARE = 0.85  # fraction of the minutes; start-up and evaluations need the rest
TOGETHER = 0.5  # fraction of the speed if the other program runs at the same time
CURVE_POINTS = 15
CURVE_MINUTES = 45.0
NAMES = ("ssdctl", "ultralytics yolo11n")
COLORS = {"light": ("#1b2028", "#0072b2", "#d55e00"), "dark": ("#e7ebf0", "#56b4e9", "#ff8f4a")}
YOLO_TRAIN = """
import os, sys
from ultralytics import YOLO
from ultralytics.utils import torch_utils
torch_utils.NUM_THREADS = len(os.sched_getaffinity(0))  # its default leaves a core unused
data, hours, project, period = sys.argv[1:]
YOLO("yolo11n.yaml").train(
    data=data, time=float(hours), device="cpu", pretrained=False, project=project, name="run",
    exist_ok=True, plots=False, save_period=int(period),
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

    began: float  # seconds since the epoch
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
    """Train both on each dataset; print a table, or draw their curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("datasets", type=Path, nargs="+", metavar="DATASET")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--ultralytics-python", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--minutes", type=float, help="with --curve: 45 if not given")
    parser.add_argument("--together", action="store_true", help="train both at the same time")
    parser.add_argument(
        "--curve", action="store_true", help="score both as they train, and draw AP over minutes"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.curve:
        options.minutes = options.minutes or CURVE_MINUTES
    if options.together and options.minutes is None:
        parser.error("--together needs --minutes")
    curves = []
    for dataset in options.datasets:
        out = options.out / dataset.name
        curve = out / "curve.json"
        if not curve.is_file():
            out.mkdir(parents=True)
            splits = open_dataset(dataset, dataset / "prepared")
            costs = train_both(options, dataset, out, splits)
            if options.curve:
                found = curve_of(options, dataset, out, splits["val"], costs)
                curve.write_text(
                    json.dumps({**facts_of(options, dataset, splits), **found}, indent=1)
                )
            else:
                results = [
                    score_ssdctl(dataset, out, splits["val"], costs[0]),
                    score_yolo(options, out, splits["val"], costs[1]),
                ]
                show(options, facts_of(options, dataset, splits), results)
        if options.curve:
            curves.append(json.loads(curve.read_text()))
            print(summary(curves[-1]))
            for theme in COLORS:  # after each dataset: a later one may fail
                draw(curves, options.out / f"curve-{theme}.webp", theme)


def train_both(
    options: argparse.Namespace, dataset: Path, out: Path, splits: dict[str, Split]
) -> list[Cost]:
    """Train ssdctl and yolo11n, one after the other or together."""
    data = write_yolo(splits, out / "yolo")
    length: list[str] = []
    if options.minutes is not None:
        train = splits["train"]  # the rule takes at most as many images without objects
        num_images = len(train.trainable) + min(len(train.trainable), len(train.background))
        length = ["--epochs", str(affordable_epochs(options, dataset, out, num_images))]
    if options.curve:
        length += ["--save-every", f"{options.minutes / CURVE_POINTS:.3f}min", "--keep", "1000"]
    ours = [*SSDCTL, "train", "--data", str(dataset), "--out", str(out / "ssdctl"),
            "--backbone-weights", "none", "--device", "cpu", "--json", *length]  # fmt: skip
    python = str(options.ultralytics_python.absolute())

    def train_yolo(minutes: float, cores: Sequence[int] = ()) -> Cost:
        words = [str(data), str(minutes / 60), str(out.absolute() / "ultralytics")]
        period = "1" if options.curve else "-1"  # epochs
        command = [python, "-c", YOLO_TRAIN, *words, period]
        return timed(command, out / "ultralytics.log", cores)

    if options.together:
        cores = sorted(os.sched_getaffinity(0))
        halves = cores[: len(cores) // 2], cores[len(cores) // 2 :]
        with ThreadPoolExecutor(2) as pool:
            futures = (
                pool.submit(timed, ours, out / "ssdctl.log", halves[0]),
                pool.submit(train_yolo, options.minutes, halves[1]),
            )
            return [future.result() for future in futures]
    first = timed(ours, out / "ssdctl.log")
    return [first, train_yolo(options.minutes if options.curve else first.wall_s / 60)]


def curve_of(
    options: argparse.Namespace, dataset: Path, out: Path, val: Split, costs: Sequence[Cost]
) -> dict[str, Any]:
    """Score the weights that both saved; return [minutes, AP, AP50] of each."""
    folders = (out / "ssdctl" / "checkpoints", out / "ultralytics" / "run" / "weights")
    curves = {}
    for name, folder, pattern, cost in zip(
        NAMES, folders, ("step-*.pt", "epoch*.pt"), costs, strict=True
    ):
        saved = sorted(((p.stat().st_mtime - cost.began) / 60, p) for p in folder.glob(pattern))
        points = [[0.0, 0.0, 0.0]]
        for minutes, weights in spread(saved, options.minutes / CURVE_POINTS):
            detections = out / "detections.json"
            if name == "ssdctl":
                detect_with_ssdctl(dataset, weights, detections)
            else:
                detect_with_yolo(options, out, weights, val, detections)
            points.append([round(minutes, 2), *(round(v, 4) for v in score(val, detections))])
        curves[name] = points
    loads = [round(cost.load, 1) for cost in costs]
    return {"minutes": options.minutes, "curves": curves, "loads": loads}


def spread(saved: Sequence[tuple[float, Path]], every: float) -> list[tuple[float, Path]]:
    """Return the last entry of each period of `every` minutes."""
    return list({int(entry[0] / every): entry for entry in saved}.values())


def summary(curve: dict[str, Any]) -> str:
    """Return a curve in a line: the last and the best AP of both, and where they cross."""
    parts = []
    for name, points in curve["curves"].items():
        minutes, best = max(points, key=lambda p: p[1])[:2]
        last = f"AP {points[-1][1]:.3f} at {points[-1][0]:.1f} min"
        parts.append(f"{name}: {last} (best {best:.3f} at {minutes:.1f})")
    first, second = curve["curves"].values()
    crossed = crossings(first, second)
    parts.append(
        f"cross at {', '.join(f'{m:.1f}' for m in crossed)} min" if crossed else "no crossing"
    )
    return f"{curve['dataset']}, {curve['val_images']} validation images: {'; '.join(parts)}"


def crossings(first: list[list[float]], second: list[list[float]]) -> list[float]:
    """Return the minutes at which the other program takes the lead, between scores by lines."""
    end = min(first[-1][0], second[-1][0])
    times = np.linspace(0, end, 1000)
    lead = np.sign(
        np.interp(times, *np.transpose(first)[:2]) - np.interp(times, *np.transpose(second)[:2])
    )
    times, lead = times[lead != 0], lead[lead != 0]
    return [round(float(t), 1) for t in times[1:][lead[1:] != lead[:-1]]]


def draw(curves: Sequence[dict[str, Any]], file: Path, theme: str) -> None:
    """Draw AP over minutes, a panel for each dataset."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, *colors = COLORS[theme]
    colored = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with matplotlib.rc_context(dict.fromkeys(colored, ink) | {"font.size": 9}):
        figure = Figure(figsize=(max(3.2 * len(curves), 5), 3.1), layout="constrained")
        axes = figure.subplots(1, len(curves), squeeze=False, sharey=True)[0]
        for panel, curve in zip(axes, curves, strict=True):
            for (name, points), color in zip(curve["curves"].items(), colors, strict=True):
                minutes, ap, _ = np.transpose(points)
                panel.plot(minutes, ap, color=color, label=name, marker=".", linewidth=1.8)
            sizes = f"{curve['train_images']} + {curve['val_images']} images"
            panel.set(title=f"{curve['dataset']} ({sizes})", xlabel="minutes", xlim=(0, None))
            panel.grid(alpha=0.2)
            panel.spines[["top", "right"]].set_visible(False)
        axes[0].set(ylabel="AP", ylim=(0, None))
        lines, labels = axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, frameon=False, loc="outside upper center", ncols=2)
        figure.savefig(file, dpi=160, transparent=True)


def affordable_epochs(options: argparse.Namespace, dataset: Path, out: Path, images: int) -> int:
    """Return how many epochs of ssdctl fit into the minutes, by the speed of a short trial."""
    trial = [*SSDCTL, "train", "--data", str(dataset), "--out", str(out / "trial"),
             "--backbone-weights", "none", "--device", "cpu", "--steps", str(TRIAL_STEPS),
             "--eval-every", "1000st", "--json"]  # fmt: skip
    done = subprocess.run(trial, check=True, stdout=subprocess.PIPE, text=True)
    rate = float(json.loads(done.stdout)["images_per_second"])
    share = TRIAL_SHARE * (TOGETHER if options.together else 1)
    return max(round(options.minutes * 60 * share * rate / images), 1)


def timed(command: list[str], log: Path, cores: Sequence[int] = ()) -> Cost:
    """Run a program in a session of its own, perhaps on some cores; its output goes to a file.

    Linux gives each session the same share of a busy machine (sched_autogroup).
    """
    if cores:
        command = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    before, start, began = os.getloadavg()[0], time.monotonic(), time.time()
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
        began,
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


def score_ssdctl(dataset: Path, out: Path, val: Split, cost: Cost) -> Result:
    """Detect with ssdctl's best checkpoint; return its score."""
    detect_with_ssdctl(dataset, out / "ssdctl" / "checkpoints" / "best.pt", out / "ssdctl.json")
    lines = (out / "ssdctl.log").read_text().splitlines()
    steps = json.loads(next(line for line in lines if line.startswith("{")))["step"]
    return Result(NAMES[0], cost, *score(val, out / "ssdctl.json"), f"{steps} steps")


def detect_with_ssdctl(dataset: Path, weights: Path, detections: Path) -> None:
    """Write the detections of a checkpoint on the validation images."""
    subprocess.run(
        [*SSDCTL, "evaluate", str(weights), "--data", str(dataset), "--device", "cpu",
         "--detections", str(detections)],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def score_yolo(options: argparse.Namespace, out: Path, val: Split, cost: Cost) -> Result:
    """Detect with ultralytics' best weights; return their score."""
    run, detections = out / "ultralytics" / "run", out / "ultralytics.json"
    detect_with_yolo(options, out, run / "weights" / "best.pt", val, detections)
    rows = (run / "results.csv").read_text().splitlines()
    return Result(NAMES[1], cost, *score(val, detections), f"{len(rows) - 1} epochs")


def detect_with_yolo(
    options: argparse.Namespace, out: Path, weights: Path, val: Split, detections: Path
) -> None:
    """Write the detections of ultralytics' weights on the validation images."""
    python, ids = (
        str(options.ultralytics_python.absolute()),
        json.dumps([c.id for c in val.classes]),
    )
    images = str(out / "yolo" / "images" / "val")
    timed(
        [python, "-c", YOLO_DETECT, str(weights.absolute()), images, ids, str(detections)],
        out / "ultralytics-detect.log",
    )


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


def facts_of(
    options: argparse.Namespace, dataset: Path, splits: dict[str, Split]
) -> dict[str, Any]:
    """Return the conditions of a comparison."""
    train, val = splits["train"], splits["val"]
    return {
        "dataset": dataset.name,
        "train_images": len(train.image_ids),
        "val_images": len(val.image_ids),
        "classes": len(train.classes),
        "cores": len(os.sched_getaffinity(0)),
        "together": options.together,
    }


def show(options: argparse.Namespace, facts: dict[str, Any], results: list[Result]) -> None:
    """Print the conditions and a row for each program."""
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
