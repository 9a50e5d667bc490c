"""`ssdctl train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.console import aligned
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import DataError, SsdctlError, Stopped
from ssdctl.launch.logs import start_rank_log
from ssdctl.runs.default_folder import run_dir
from ssdctl.runs.layout import RunDir
from ssdctl.runs.progress import duration
from ssdctl.runtime import signals
from ssdctl.runtime.cores import quota_cores, usable_cores
from ssdctl.runtime.packages import check_memory_limit
from ssdctl.runtime.process_settings import tune_process

if TYPE_CHECKING:
    from ssdctl.data.open_dataset import DatasetSize
    from ssdctl.training.run import SettledRun
    from ssdctl.training.schedule import TrainSchedule
    from ssdctl.training.trainer import Summary


@command(
    app,
    "train",
    panel="Train",
    settings=["data.*", "model.*", "train.*"],
    short=(
        "--data",
        "--out",
        "--init",
        "--preset",
        "--epochs",
        "--bs",
        "--lr",
        "--device",
        "--bf16",
        "--fp16",
        "--fp32",
        "--resume",
        "--eval-every",
        "--dry-run",
    ),
    examples=[
        "ssdctl train --data /data/coco --out runs/first",
        "ssdctl train --preset nvidia-r50 --bs 64 --bf16",
        "ssdctl train --steps 100 --warmup 10st --backbone-weights none   # a short trial",
        "ssdctl train --fake-data --steps 100 --warmup 10st   # the device's speed, no dataset",
        "ssdctl train --dry-run --json   # the plan: steps, warm-up, learning rate",
    ],
)
def train(
    call: Call,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan without training", rich_help_panel="Run"),
    ] = False,
) -> None:
    """Train a detector, or resume a stopped run.

    Ctrl-C and SIGTERM save the run and exit with 75; run the same command again to continue. A
    second Ctrl-C exits immediately.
    """
    if dry_run:
        _show_plan(call)
        return
    check_memory_limit()
    signals.install()  # not yet installed if another command, such as demo, runs this one
    if call.config.train.pipeline != "dali":  # DALI is slower with it
        tune_process()
    ranks, run = find_ranks(), run_dir(call.config)
    is_main = ranks.is_main
    if not ranks.is_single_process:
        start_rank_log(run.rank_log(ranks.rank), ranks.rank)
    call.console.quiet = call.console.quiet or not is_main  # only rank 0 writes to the terminal
    try:
        from ssdctl.cli.progress_bar import TrainingDisplay
        from ssdctl.data.store_folder import with_absolute_data
        from ssdctl.training.setup import run_training

        with TrainingDisplay(call.console) as display, signals.announced(display.info):
            summary = run_training(
                with_absolute_data(call.resolved),
                emit=display.show,
                progress=call.console.progress,
            )
    except Stopped as stop:
        if is_main:
            raise
        raise SystemExit(stop.exit_code) from None
    finally:
        signals.restore()
    if not is_main:
        return
    _print_summary(call, summary)


def _print_summary(call: Call, summary: Summary) -> None:
    from ssdctl.runs.reader import read_run

    run = RunDir(Path(summary.out))
    ap = "no AP" if summary.best_ap is None else f"best AP {summary.best_ap:.3f}"
    trained = ""
    if summary.images_per_second:  # else the run was already finished
        trained = (
            f" in {duration(summary.total_s)}, {summary.images_per_second:.1f} img/s, "
            f"peak memory {summary.peak_memory_bytes / 1e9:.1f} GB"
        )
    call.console.result(summary._asdict(), f"{run.path}: {summary.step} steps{trained}, {ap}")
    facts = [("last", f"{run.last} (step {summary.step:,})")]
    best = read_run(run.path).best if run.best.is_file() else None
    if best is not None and best["AP"] >= 0:
        facts = [("best", f"{run.best} (AP {best['AP']:.3f}, step {best['step']:,.0f})")]
    facts.append(("wrote", f"{run.path} (checkpoints, metrics.jsonl, config.toml)"))
    path = shlex.quote(str(run.path))
    commands = [f"ssdctl predict {path} photo.jpg --out drawn"]
    if best is not None:
        commands.append(f"ssdctl report {path}")
    call.console.closing(facts, commands)


def _show_plan(call: Call) -> None:
    from ssdctl.config.devices import DEVICE_TYPES
    from ssdctl.data.dataset import (
        COCO_NUM_CLASSES,
        WHAT_IS_DROPPED,
        warning_without_validation,
    )
    from ssdctl.training import description
    from ssdctl.training.run import finalize
    from ssdctl.training.weight_sources import check_weight_sources

    root, size = _dataset_size(call)
    if not size.trainable:
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    ranks, network = find_ranks(), None
    if call.config.train.init is not None:
        from ssdctl.training.setup import planned_network  # late: torch takes seconds

        network = planned_network(call.resolved)
    device = DEVICE_TYPES.get(call.config.train.device)
    run = finalize(call.resolved, device, ranks, size.trainable, network=network)
    for notice in run.notices:
        call.console.warning(notice)
    resolved, plan, config, images = run.resolved, run.plan, run.config, run.plan.images
    check_weight_sources(call.config)
    if not size.validation and root.exists() and not config.train.fake_data:
        call.console.warning(warning_without_validation(root))
    if warning := description.warning_of_cut(resolved, plan):
        call.console.warning(warning)
    for warning in description.warnings_of_unreached(resolved, plan):
        call.console.warning(warning)
    workers, quota = config.train.workers or usable_cores(ranks.world_size), quota_cores()
    data = {
        **plan.as_json(),
        "recipe": run.rule or f"preset {config.train.preset}",
        "workers": workers,
        "cpu_quota": quota,
    }
    if call.console.as_json:
        call.console.result(data)
        return
    evaluations = description.evaluations_after(resolved, plan, 0) if size.validation else []
    shown = min(size.validation, config.train.overfit or size.validation)
    data_line = f"assumed: COCO, {images:,} training images, {COCO_NUM_CLASSES} classes"
    if size.classes:
        data_line = description.data_line(root, images, shown, size.classes)
    rows = {
        "data": data_line,
        "network": description.network_line(config),
        "device": f"{_device(config.train.device)}, precision {config.train.precision}",
        "length": description.length_line(plan, len(evaluations)) + _known_time(run),
        "recipe": description.recipe_line(resolved, plan),
        "batch": f"{plan.global_batch_size}{_too_large(plan)}; {plan.steps_per_epoch:,} steps "
        "per epoch",
        "learning rate": f"{plan.peak_lr:g} after the warm-up = --lr {config.train.lr:g} "
        f"(for a batch of 32) x {plan.global_batch_size} / 32",
        "warm-up steps": f"{plan.warmup_steps:,}",
        "decode threads": f"{workers} per rank" + (f"; CPU quota: {quota} cores" if quota else ""),
        "decay at steps": ", ".join(f"{step:,}" for step in plan.decay_steps) or "never",
        "checkpoints": _disk_needed(run, len(size.classes) or COCO_NUM_CLASSES),
        "run": str(run.out),
    }
    if call.console.verbose and (details := description.details_line(resolved)):
        rows["details"] = details
    call.console.result(None, aligned(list(rows.items())))


def _dataset_size(call: Call) -> tuple[Path, DatasetSize]:
    """Return the dataset and its size; COCO's, without classes, if none was named or is read.

    Raises:
        DataError: The dataset that --data names does not exist, or is invalid.
    """
    from ssdctl.data.dataset import COCO_NUM_IMAGES
    from ssdctl.data.open_dataset import DatasetSize, count_images
    from ssdctl.data.store_folder import dataset_folders

    root, folder = dataset_folders(call.config.data)
    if root.exists() or (call.config.data.root and not call.config.train.fake_data):
        return root, count_images(root, folder)
    if not call.config.train.fake_data:
        call.console.warning(
            f"no --data, and no dataset in {root}: the plan assumes COCO's {COCO_NUM_IMAGES:,} "
            "training images with boxes"
        )
    return root, DatasetSize(COCO_NUM_IMAGES, 0, [])


def _device(name: str) -> str:
    """Return the device of a run on this machine, without opening it."""
    from ssdctl.runtime.hardware import find_hardware

    if name != "auto":
        return name
    found = find_hardware()
    return f"{'cuda' if found.num_nvidia else 'hpu' if found.num_gaudi else 'cpu'} (auto)"


def _known_time(run: SettledRun) -> str:
    """Return the time that the steps take if the run has been started before; else nothing."""
    from ssdctl.runs.reader import read_run

    try:
        rate = read_run(run.out).train[-1]["images_per_second"]
        seconds = run.plan.total_steps * run.plan.global_batch_size / float(rate)
    except (SsdctlError, LookupError, TypeError, ValueError, ArithmeticError):
        return ""
    return f", {duration(seconds)} at the run's last {rate:.1f} img/s"


def _disk_needed(run: SettledRun, classes: int) -> str:
    """Return the disk space that the checkpoints need, and the free space."""
    from ssdctl.files import free_bytes
    from ssdctl.training.schedule import checkpoint_bytes

    config = run.config
    each = checkpoint_bytes(config.model.backbone, classes + 1, config.train)
    kept = config.train.keep + 2
    return (
        f"{each / 1e6:,.0f} MB each, {kept * each / 1e9:.1f} GB at most "
        f"(--keep {config.train.keep}, the best, one being written); "
        f"{free_bytes(run.out.absolute()) / 1e9:,.0f} GB free"
    )


def _too_large(plan: TrainSchedule) -> str:
    if plan.global_batch_size <= plan.images:
        return ""
    return ", more than there are images: a step uses some of them several times"
