"""`ssdctl demo`: run the whole pipeline with the commands that a user would type."""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from ssdctl.cli.command import Call, command, isolated
from ssdctl.cli.console import painted
from ssdctl.cli.help import click_root
from ssdctl.config import Config
from ssdctl.config.render import plain_value, values
from ssdctl.config.settings import all_settings
from ssdctl.errors import ExitCode
from ssdctl.runs.folder import RunDir
from ssdctl.runtime.progress import duration, step_time

# Tuned on two cores from random weights (benchmarks/RESULTS.md); without augmentation, because each
# image is used only once.
BATCH_SIZE = 2
RECIPE = (
    "--preset stable-r34 --backbone resnet18 --backbone-weights none --extra-norm batch "
    f"--augment none --optimizer adamw --weight-decay 0.01 --clip-grad 10 --bs {BATCH_SIZE} "
    "--lr 8e-3 --warmup 15st --lr-decay cosine --decay-epochs 0.08,{end:.3f} "
    "--eval-every {every}st --log-every 10"
)
IMAGES, VAL_IMAGES = 1080, 100
STAGES = {
    "shapes": f"draw {IMAGES + VAL_IMAGES:,} images of five kinds of objects",
    "prepare": "check images and annotations, and pack them",
    "train": f"{{steps}} steps of {BATCH_SIZE} images",
    "evaluate": f"COCO AP on {VAL_IMAGES} held-out images",
    "report": "one HTML page: curves, errors, samples",
    "predict": "draw the detections on four held-out images",
}
USEFUL_STEPS = 300  # for AP 0.4: 280 reached 0.41
FULL_STEPS = 520  # one pass over the images
BUDGET_S = 270.0  # for the whole demo; the rest of five minutes is a reserve
EVALUATIONS = 5  # during the training
# On two idle cores, the other stages take as long as these training steps and seconds.
DRAWING_STEPS, EVALUATION_STEPS, OTHERS_S = 80, 20, 16.0
COLUMNS = 80  # for the printed commands
SHEET_CELL = (440, 330)  # pixels of an image of the contact sheet
SHEET_BORDER = 4


@command(
    "demo", panel="Start here", examples=["ssdctl demo", "ssdctl demo --out /tmp/demo --seed 1"]
)
def demo(
    call: Call,
    out: Annotated[str, Option(metavar="DIR", help="Output folder")] = "demo",
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of data and training")] = 0,
) -> None:
    """Run the full pipeline in minutes, offline.

    A small detector is trained from random weights to find shapes, for about four minutes. Each
    command is printed before it runs. Run the demo again to continue an interrupted one.
    """
    start = time.monotonic()
    folder = Path(out)
    data, run, sheet = folder / "shapes", folder / "run", folder / "detections.png"
    steps = _announced_steps(call, run, start)
    commands: list[str] = []
    again = shlex.join(["ssdctl", "demo", "--out", out, "--seed", str(seed)])
    run_stage = functools.partial(_run_stage, call, commands, again)
    run_stage("download", "--dataset", "shapes", "--dest", str(data), "--images", str(IMAGES),
              "--seed", str(seed))  # fmt: skip
    run_stage("prepare", "--data", str(data))
    run_stage("train", "--data", str(data), "--out", str(run), "--seed", str(seed),
              *recipe(steps).split(), "--steps", str(steps))  # fmt: skip
    run_stage("evaluate", str(RunDir(run).best))
    run_stage("report", str(run))
    images = held_out_images(data)
    drawn = ["--out", str(folder / "drawn")]
    if call.config_file is not None and call.config.predict.save is not None:
        drawn += ["--set", "predict.save="]  # the images are drawn
    run_stage("predict", str(run), *map(str, images), *drawn)
    write_contact_sheet([folder / "drawn" / image.name for image in images], sheet)
    _print_result(call, run, sheet, steps, commands, time.monotonic() - start)


def _announced_steps(call: Call, run: Path, start: float) -> int:
    """Print the stages and their expected duration; return the number of training steps."""
    console = call.console
    console.info("ssdctl demo: train an object detector from random weights, offline", "bold")
    steps, about = steps_of_run(run), "Continues an earlier start."
    if steps is None:
        console.info("Measuring the speed of this machine...")
        step_s = seconds_per_step(call.config)
        steps = affordable_steps(step_s, BUDGET_S - (time.monotonic() - start))
        time_s, pace = duration(total_seconds(steps, step_s)), step_time(step_s)
        about = f"This takes about {time_s} on this machine ({pace} measured just now)."
    for number, (name, description) in enumerate(STAGES.items(), 1):
        console.info(f"  {number} {name:<9} {description.format(steps=steps)}")
    console.info(f"{about} Ctrl-C stops at any time; the same command continues.")
    return steps


def _run_stage(call: Call, commands: list[str], again: str, *arguments: str) -> None:
    """Print a command and run it; add it to the finished `commands`."""
    console, stage = call.console, list(STAGES)[len(commands)]
    device = f"{arguments[0]}.device"
    if device in all_settings() and call.config.is_chosen(device):
        arguments += ("--device", plain_value(values(call.config)[device]))
    console.info(f"\n{len(commands) + 1}/{len(STAGES)} {stage}", "bold")
    console.info(echoed(arguments), "dim")
    try:
        used = [text for text in call.assignments if _is_used(arguments[0], text)]
        line = [*arguments, *_common_options(call._replace(assignments=used))]
        with isolated(call.config_file is None):
            click_root().main(args=line, prog_name="ssdctl", standalone_mode=False)
    except SystemExit as end:
        if end.code in (ExitCode.STOPPED, ExitCode.INTERRUPTED):
            console.info(f"To continue the demo: {again}")
        raise
    commands.append(shlex.join(["ssdctl", *arguments]))


def _is_used(command: str, assignment: str) -> bool:
    """Return whether a stage takes a `--set`, of which all stages of the demo get the same."""
    from ssdctl.training.plan import is_of_detectors

    return command != "train" or not is_of_detectors(assignment.partition("=")[0])


def _common_options(call: Call) -> list[str]:
    options = ["--quiet"] if call.console.quiet or call.console.as_json else []
    options += ["--verbose"] if call.console.verbose else []
    options += ["--config", call.config_file] if call.config_file else []
    return options + [part for text in call.assignments for part in ("--set", text)]


def recipe(steps: int) -> str:
    return RECIPE.format(end=steps / FULL_STEPS, every=steps // EVALUATIONS)


def seconds_per_step(config: Config) -> float:
    """Measure the seconds of a training step of the demo's network; nearly 0 on an accelerator."""
    import msgspec

    from ssdctl.benchmark import train as benchmark
    from ssdctl.checkpoint.format import Architecture
    from ssdctl.data.open_dataset import DatasetSize
    from ssdctl.data.shapes import CLASSES
    from ssdctl.device import open_device
    from ssdctl.distributed import SINGLE_PROCESS
    from ssdctl.training.plan import make_plan

    settings = msgspec.structs.replace(config.train, optimizer="adamw", clip_grad=10.0)
    device = open_device(settings.device, 0, settings.execution)
    if not device.is_host:
        return 1e-3  # fast enough for the full number of steps
    plan = make_plan(config, device, SINGLE_PROCESS, DatasetSize(IMAGES, None, 0, []))
    architecture = Architecture("resnet18", "batch", len(CLASSES) + 1)
    return benchmark.seconds_per_step(architecture, settings, device, plan.precision, BATCH_SIZE)


def affordable_steps(step_s: float, left_s: float) -> int:
    """Return the steps that fit into `left_s`, with the other stages; a multiple of 10."""
    steps = (left_s - total_seconds(0, step_s)) / step_s
    return min(max(int(steps) // 10 * 10, USEFUL_STEPS), FULL_STEPS)


def total_seconds(steps: int, step_s: float) -> float:
    """Return the expected duration of the demo, with an evaluation after the training."""
    others = DRAWING_STEPS + (EVALUATIONS + 1) * EVALUATION_STEPS
    return (steps + others) * step_s + OTHERS_S


def steps_of_run(run: Path) -> int | None:
    """Return the planned steps of an interrupted demo, or None if its training has not started."""
    from ssdctl.runs.run import Run

    if not (run / "checkpoints").is_dir():
        return None
    steps = Run(run).settings.get("train.steps")
    return int(steps) if steps else None


def echoed(arguments: Sequence[str]) -> str:
    """Return a command for the terminal; a long one continues in lines that begin with options."""
    text = re.sub(r" (?!--)", "\0", shlex.join(["ssdctl", *arguments]))
    lines = textwrap.wrap(
        text,
        COLUMNS - len(" \\"),
        initial_indent="$ ",
        subsequent_indent=" " * 4,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return " \\\n".join(lines).replace("\0", " ")


def held_out_images(data: Path) -> list[Path]:
    """Return the first four landscape validation images with at least three objects, no crowd."""
    import numpy as np

    from ssdctl.data.open_dataset import annotations_with_images
    from ssdctl.data.store_folder import default_store

    val = annotations_with_images(data, default_store(data))["val"]
    counts = np.bincount(val.rows, minlength=len(val.sizes))
    crowds = np.bincount(val.rows, val.is_crowd, len(val.sizes))
    is_chosen = (val.sizes[:, 0] > val.sizes[:, 1]) & (counts >= 3) & (crowds == 0)
    return [val.folder / val.file_names[row] for row in np.nonzero(is_chosen)[0][:4]]


def write_contact_sheet(images: Sequence[Path], path: Path) -> None:
    """Write up to four images as one, two in a row."""
    from PIL import Image, ImageOps

    from ssdctl.data.drawing import write_image

    cells = []
    for image in images:
        with Image.open(image) as opened:
            cell = ImageOps.pad(opened.convert("RGB"), SHEET_CELL, color="white")
        cells.append(ImageOps.expand(cell, SHEET_BORDER, "white"))
    width, height = cells[0].size
    sheet = Image.new("RGB", (2 * width, -(-len(cells) // 2) * height), "white")
    for number, cell in enumerate(cells):
        row, column = divmod(number, 2)
        sheet.paste(cell, (column * width, row * height))
    write_image(sheet, path, "PNG")


def _print_result(
    call: Call, run: Path, sheet: Path, steps: int, commands: list[str], spent_s: float
) -> None:
    from ssdctl.runs.run import Run

    best = Run(run).best_metrics
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
    ap = painted(f"AP {best['AP']:.3f}  AP50 {best['AP50']:.3f}", "green")
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
