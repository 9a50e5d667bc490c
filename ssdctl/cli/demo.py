"""`ssdctl demo`: run the whole pipeline with the commands that a user would type."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from ssdctl.cli.app import app, run_command
from ssdctl.cli.command import Call, command
from ssdctl.config import TrainConfig
from ssdctl.runs.layout import RunDir

# Tuned on two cores (benchmarks/RESULTS.md), from random weights. There is no augmentation, because
# each image is used only once.
BATCH_SIZE = 2
RECIPE = (
    "--preset stable-r34 --backbone resnet18 --backbone-weights none --extra-norm batch "
    f"--augment none --optimizer adamw --weight-decay 0.01 --clip-grad 10 --bs {BATCH_SIZE} "
    "--lr 8e-3 --warmup 15st --lr-decay cosine --decay-epochs 0.08,{end:.3f}"
)
IMAGES = 1080
USEFUL_STEPS = 300  # for AP 0.4: 280 reached 0.41
FULL_STEPS = 520  # one pass over the images
BUDGET_S = 270.0  # of the whole demo; the rest of five minutes is a reserve
EVALUATION_STEPS = 40  # time of the two evaluations of 100 images, in training steps
REPORT_S = 10.0


@command(
    app,
    "demo",
    panel="Start here",
    examples=["ssdctl demo", "ssdctl demo --out /tmp/demo --seed 1"],
)
def demo(
    call: Call,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Output folder")] = "demo",
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", min=0, help="Seed of data and training")
    ] = 0,
) -> None:
    """Run the full pipeline in minutes, offline.

    A small detector is trained from random weights to find shapes, for about five minutes. Each
    command is printed before it runs. Run the demo again to continue an interrupted one.
    """
    start = time.monotonic()
    folder = Path(out)
    data, run = folder / "shapes", folder / "run"
    common = ["--quiet"] if call.console.quiet or call.console.as_json else []
    common += ["--verbose"] if call.console.verbose else []
    common += ["--config", call.config_file] if call.config_file else []
    common += [part for text in call.assignments for part in ("--set", text)]
    commands: list[str] = []

    def run_step(*arguments: str) -> None:
        line = shlex.join(["ssdctl", *arguments])
        call.console.info(f"\n$ {line}")
        run_command([*arguments, *common], stdout_to_stderr=call.console.as_json)
        commands.append(line)

    run_step("download", "--dataset", "shapes", "--dest", str(data), "--images", str(IMAGES),
             "--seed", str(seed))  # fmt: skip
    run_step("prepare", "--data", str(data))
    steps = steps_of_run(run)
    if steps is None:
        step_s = seconds_per_step(call.config.train)
        steps = affordable_steps(step_s, BUDGET_S - (time.monotonic() - start))
        call.console.info(f"\n{_training_length(steps, step_s)}")
    run_step("train", "--data", str(data), "--out", str(run), "--seed", str(seed),
             *recipe(steps).split(), "--steps", str(steps))  # fmt: skip
    run_step("evaluate", str(RunDir(run).best))
    run_step("report", str(run))
    _print_result(call, run, steps, commands, time.monotonic() - start)


def recipe(steps: int) -> str:
    """Return the options of a training whose learning rate decays until its last step."""
    return RECIPE.format(end=steps / FULL_STEPS)


def seconds_per_step(config: TrainConfig) -> float:
    """Measure the seconds of a training step of the demo's network; nearly 0 on an accelerator."""
    import msgspec

    from ssdctl.checkpoint.format import Architecture
    from ssdctl.data.shapes import CLASSES
    from ssdctl.device import open_device
    from ssdctl.train.memory import random_batch
    from ssdctl.train.optimizer import build_optimizer
    from ssdctl.train.setup import choose_precision
    from ssdctl.train.step import TrainStep

    config = msgspec.structs.replace(config, optimizer="adamw", clip_grad=10.0)
    device = open_device(config.device, 0, config.execution)
    if not device.is_host:
        return 1e-3  # fast enough for the full number of steps
    model = device.place(Architecture("resnet18", "batch", len(CLASSES) + 1).build()).train()
    precision = choose_precision(config.precision, device)
    step = TrainStep(model, build_optimizer(model, config, device), device, config, precision)
    batch = random_batch(BATCH_SIZE, len(CLASSES) + 1, max_boxes=12, real_boxes=7)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        step([batch], 1e-6)
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first one allocates; others may be disturbed by other processes


def affordable_steps(step_s: float, left_s: float) -> int:
    """Return how many steps to train.

    Args:
        step_s: Seconds per step.
        left_s: Seconds left for training, evaluation and report.

    Returns:
        A multiple of 10, at least `USEFUL_STEPS` and at most `FULL_STEPS`.
    """
    steps = (left_s - REPORT_S) / step_s - EVALUATION_STEPS
    return min(max(int(steps) // 10 * 10, USEFUL_STEPS), FULL_STEPS)


def steps_of_run(run: Path) -> int | None:
    """Return the planned steps of an interrupted demo, or None if its training has not started."""
    from ssdctl.runs.reader import read_run

    if not (run / "checkpoints").is_dir():
        return None
    steps = read_run(run).settings.get("train.steps")
    return int(steps) if steps else None


def _training_length(steps: int, step_s: float) -> str:
    minutes = steps * step_s / 60
    text = (
        f"A step takes {step_s:.2f} s on this machine: training takes {steps} steps, "
        f"{minutes:.1f} minutes"
    )
    if steps == FULL_STEPS:
        return f"{text}, one pass over the images."
    reason = "the minimum" if steps == USEFUL_STEPS else "as many as fit into 5 minutes"
    more = f"{FULL_STEPS} steps would take {FULL_STEPS * step_s / 60:.1f} minutes"
    return f"{text} ({reason}). {more} and reach an AP of about 0.5."


def _print_result(call: Call, run: Path, steps: int, commands: list[str], spent_s: float) -> None:
    from ssdctl.runs.reader import read_run

    best = read_run(run).best
    assert best is not None  # the run above evaluated
    report = RunDir(run).report
    data = {
        "AP": best["AP"],
        "AP50": best["AP50"],
        "report": str(report),
        "seconds": round(spent_s, 1),
        "steps": steps,
        "commands": commands,
    }
    lines = [
        "",
        f"AP {best['AP']:.3f}, AP50 {best['AP50']:.3f} on held-out images after {steps} steps, "
        f"in {spent_s:.0f} seconds. The commands that were run:",
        *(f"  {line}" for line in commands),
        f"Report: {report}",
        f"For a better detector, repeat the training with --steps {2 * FULL_STEPS} --out DIR",
    ]
    call.console.result(data, "\n".join(lines))
