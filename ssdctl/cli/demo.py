"""`ssdctl demo`: run the whole pipeline with the commands that a user would type."""

from __future__ import annotations

import contextlib
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Option

from ssdctl.cli.command import Call, click_root, command
from ssdctl.config import Resolved
from ssdctl.errors import ExitCode
from ssdctl.runs.display import duration, step_time
from ssdctl.runs.layout import RunDir

# Tuned on two cores (benchmarks/RESULTS.md), from random weights. There is no augmentation, because
# each image is used only once.
BATCH_SIZE = 2
RECIPE = (
    "--preset stable-r34 --backbone resnet18 --backbone-weights none --extra-norm batch "
    f"--augment none --optimizer adamw --weight-decay 0.01 --clip-grad 10 --bs {BATCH_SIZE} "
    "--lr 8e-3 --warmup 15st --lr-decay cosine --decay-epochs 0.08,{end:.3f} "
    "--eval-every {every}st --log-every 10"
)
IMAGES, VAL_IMAGES = 1080, 100
USEFUL_STEPS = 300  # for AP 0.4: 280 reached 0.41
FULL_STEPS = 520  # one pass over the images
BUDGET_S = 270.0  # for the whole demo; the rest of five minutes is a reserve
EVALUATIONS = 5  # during the training
EVALUATION_STEPS = 20  # time of an evaluation of 100 images, in training steps
# Seconds of the stages on two idle cores, apart from what the steps and the drawing take.
PREPARE_S, EVALUATE_S, REPORT_S, PREDICT_S = 4.0, 4.0, 6.0, 2.0
WARM_UP_STEPS, TIMED_STEPS = 3, 5
MEASURED_S = 5.0  # a slow machine takes fewer steps
COLUMNS = 80  # for the printed commands
SHEET_CELL = (440, 330)  # pixels of an image of the contact sheet
SHEET_GAP = 8


class Speed(NamedTuple):
    """What was measured on this machine, in seconds."""

    step_s: float  # a training step
    image_s: float  # drawing and writing an image of the dataset


class Stage(NamedTuple):
    name: str
    description: str
    seconds: float  # expected


@command(
    "demo", panel="Start here", examples=["ssdctl demo", "ssdctl demo --out /tmp/demo --seed 1"]
)
def demo(
    call: Call,
    out: Annotated[str, Option(metavar="DIR", help="Output folder")] = "demo",
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of data and training")] = 0,
) -> None:
    """Run the full pipeline in minutes, offline.

    A small detector is trained from random weights to find shapes, for about five minutes. Each
    command is printed before it runs. Run the demo again to continue an interrupted one.
    """
    start = time.monotonic()
    folder, console = Path(out), call.console
    data, run, sheet = folder / "shapes", folder / "run", folder / "detections.png"
    console.info("ssdctl demo: train an object detector from random weights, offline", "bold")
    steps, speed = steps_of_run(run), None
    if steps is None:
        console.info("Measuring the speed of this machine...")
        speed = measured_speed(call.resolved)
        steps = affordable_steps(speed, BUDGET_S - (time.monotonic() - start))
    stages = expected_stages(steps, speed or Speed(0.0, 0.0))
    _show_stages(call, stages, speed)
    commands: list[str] = []
    own_command = ["ssdctl", "demo"]
    own_command += ["--out", out] if out != "demo" else []
    own_command += ["--seed", str(seed)] if seed else []

    def run_stage(*arguments: str) -> None:
        stage = stages[len(commands)]
        console.info(f"\n{len(commands) + 1}/{len(stages)} {stage.name}", "bold")
        console.info("\n".join(echoed(arguments)), "dim")
        try:
            with contextlib.redirect_stdout(sys.stderr if console.as_json else sys.stdout):
                line = [*arguments, *_common_options(call)]
                click_root().main(args=line, prog_name="ssdctl", standalone_mode=False)
        except SystemExit as end:
            if end.code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
                console.info(f"To continue the demo: {shlex.join(own_command)}")
            raise
        commands.append(shlex.join(["ssdctl", *arguments]))

    run_stage("download", "--dataset", "shapes", "--dest", str(data), "--images", str(IMAGES),
              "--seed", str(seed))  # fmt: skip
    run_stage("prepare", "--data", str(data))
    run_stage("train", "--data", str(data), "--out", str(run), "--seed", str(seed),
              *recipe(steps).split(), "--steps", str(steps))  # fmt: skip
    run_stage("evaluate", str(RunDir(run).best))
    run_stage("report", str(run))
    images = held_out_images(data)
    run_stage("predict", str(run), *map(str, images), "--out", str(folder / "drawn"))
    write_contact_sheet([folder / "drawn" / image.name for image in images], sheet)
    _print_result(call, run, sheet, steps, commands, time.monotonic() - start)


def _common_options(call: Call) -> list[str]:
    options = ["--quiet"] if call.console.quiet or call.console.as_json else []
    options += ["--verbose"] if call.console.verbose else []
    options += ["--config", call.config_file] if call.config_file else []
    return options + [part for text in call.assignments for part in ("--set", text)]


def recipe(steps: int) -> str:
    return RECIPE.format(end=steps / FULL_STEPS, every=steps // EVALUATIONS)


def measured_speed(resolved: Resolved) -> Speed:
    from ssdctl.data.shapes import draw_image
    from ssdctl.training.optimizer import without_dynamo

    with without_dynamo():
        step_s = seconds_per_step(resolved)
    start = time.perf_counter()
    for index in range(TIMED_STEPS):
        draw_image(0, "train", index)
    return Speed(step_s, (time.perf_counter() - start) / TIMED_STEPS)


def seconds_per_step(resolved: Resolved) -> float:
    """Measure the seconds of a training step of the demo's network; nearly 0 on an accelerator."""
    import msgspec

    from ssdctl.data.shapes import CLASSES
    from ssdctl.device import open_device
    from ssdctl.distributed.ranks import SINGLE_PROCESS
    from ssdctl.input.fake import random_batch
    from ssdctl.model.ssd300 import Architecture
    from ssdctl.training.run import finalize
    from ssdctl.training.step import build_step

    config = msgspec.structs.replace(resolved.config.train, optimizer="adamw", clip_grad=10.0)
    device = open_device(config.device, 0, config.execution)
    if not device.is_host:
        return 1e-3  # fast enough for the full number of steps
    model = device.place(Architecture("resnet18", "batch", len(CLASSES) + 1).build()).train()
    run = finalize(resolved, device, SINGLE_PROCESS, IMAGES)
    step = build_step(model, config, device, run.precision)
    batch = random_batch(BATCH_SIZE, len(CLASSES) + 1, max_boxes=12)
    times: list[float] = []
    while len(times) < WARM_UP_STEPS + TIMED_STEPS:
        start = time.perf_counter()
        step([batch], 1e-6)
        times.append(time.perf_counter() - start)
        if len(times) > WARM_UP_STEPS + 1 and sum(times) > MEASURED_S:
            break
    return statistics.median(times[WARM_UP_STEPS:])


def affordable_steps(speed: Speed, left_s: float) -> int:
    """Return the steps that fit into `left_s`, with the other stages; a multiple of 10."""
    others_s = sum(stage.seconds for stage in expected_stages(0, speed))
    steps = (left_s - others_s) / speed.step_s
    return min(max(int(steps) // 10 * 10, USEFUL_STEPS), FULL_STEPS)


def steps_of_run(run: Path) -> int | None:
    """Return the planned steps of an interrupted demo, or None if its training has not started."""
    from ssdctl.runs.reader import read_run

    if not (run / "checkpoints").is_dir():
        return None
    steps = read_run(run).settings.get("train.steps")
    return int(steps) if steps else None


def expected_stages(steps: int, speed: Speed) -> list[Stage]:
    images, evaluation_s = IMAGES + VAL_IMAGES, EVALUATION_STEPS * speed.step_s
    return [
        Stage("shapes", f"draw {images:,} images of five kinds of objects", images * speed.image_s),
        Stage("prepare", "check images and annotations, and pack them", PREPARE_S),
        Stage(
            "train",
            f"{steps} steps of {BATCH_SIZE} images",
            steps * speed.step_s + EVALUATIONS * evaluation_s,
        ),
        Stage("evaluate", f"COCO AP on {VAL_IMAGES} held-out images", EVALUATE_S + evaluation_s),
        Stage("report", "one HTML page: curves, errors, samples", REPORT_S),
        Stage("predict", "draw the detections on four held-out images", PREDICT_S),
    ]


def _show_stages(call: Call, stages: Sequence[Stage], speed: Speed | None) -> None:
    total_s = sum(stage.seconds for stage in stages)
    for number, stage in enumerate(stages, 1):
        time_s = "" if speed is None or stage.seconds < 15 else f"about {duration(stage.seconds)}"
        call.console.info(f"  {number} {stage.name:<9} {stage.description:<45} {time_s}".rstrip())
    stop = "Ctrl-C stops at any time; the same command continues."
    if speed is None:
        call.console.info(f"Continues an earlier start. {stop}")
    else:
        pace = f"{step_time(speed.step_s)} measured just now"
        call.console.info(f"In all about {duration(total_s)} on this machine ({pace}). {stop}")


def echoed(arguments: Sequence[str]) -> list[str]:
    """Return a command for the terminal; a long one continues in lines that begin with options."""
    words: list[str] = []  # an option with its value is one
    for argument in arguments:
        if words and words[-1].startswith("--") and " " not in words[-1] and argument[:2] != "--":
            words[-1] += f" {shlex.quote(argument)}"
        else:
            words.append(shlex.quote(argument))
    lines = ["$ ssdctl"]
    for word in words:
        if len(lines[-1]) + 1 + len(word) + 2 > COLUMNS:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def held_out_images(data: Path) -> list[Path]:
    """Return the first four landscape validation images with at least three objects, no crowd."""
    import numpy as np

    from ssdctl.data.open_dataset import annotations_of
    from ssdctl.data.store_folder import default_store

    val = annotations_of(data, default_store(data))["val"]
    counts = np.bincount(val.rows, minlength=len(val.sizes))
    crowds = np.bincount(val.rows, val.is_crowd, len(val.sizes))
    is_chosen = (val.sizes[:, 0] > val.sizes[:, 1]) & (counts >= 3) & (crowds == 0)
    return [val.folder / val.file_names[row] for row in np.nonzero(is_chosen)[0][:4]]


def write_contact_sheet(images: Sequence[Path], path: Path) -> None:
    """Write up to four images as one, two in a row."""
    from PIL import Image, ImageOps

    from ssdctl.files import atomic_write

    width, height = SHEET_CELL
    rows = -(-len(images) // 2)
    size = (2 * width + 3 * SHEET_GAP, rows * (height + SHEET_GAP) + SHEET_GAP)
    sheet = Image.new("RGB", size, "white")
    for number, image in enumerate(images):
        with Image.open(image) as opened:
            cell = ImageOps.pad(opened.convert("RGB"), SHEET_CELL, color="white")
        row, column = divmod(number, 2)
        corner = SHEET_GAP + column * (width + SHEET_GAP), SHEET_GAP + row * (height + SHEET_GAP)
        sheet.paste(cell, corner)
    with atomic_write(path) as file:
        sheet.save(file, "PNG")


def _print_result(
    call: Call, run: Path, sheet: Path, steps: int, commands: list[str], spent_s: float
) -> None:
    from ssdctl.runs.reader import read_run

    best = read_run(run).best
    assert best is not None  # the run above evaluated
    report = RunDir(run).report
    data = {
        "AP": best["AP"],
        "AP50": best["AP50"],
        "report": str(report),
        "detections": str(sheet),
        "seconds": round(spent_s, 1),
        "steps": steps,
        "commands": commands,
    }
    call.console.info("")
    ap = call.console.painted(f"AP {best['AP']:.3f}  AP50 {best['AP50']:.3f}", "green")
    call.console.result(
        data,
        f"{ap}  on {VAL_IMAGES} held-out images, {steps} steps from random weights; "
        f"this start took {duration(spent_s)}",
        is_painted=True,
    )
    call.console.closing(
        [("detections", sheet), ("report", report), ("best", str(RunDir(run).best))],
        ["ssdctl prepare --data YOUR_IMAGES --split 0.9", "ssdctl train --data YOUR_IMAGES"],
    )
