"""`ssdctl train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import DataError, Stopped
from ssdctl.launch.logs import start_rank_log
from ssdctl.runs.default_folder import run_dir
from ssdctl.runtime import signals
from ssdctl.runtime.cores import quota_cores, usable_cores
from ssdctl.runtime.process_settings import tune_process

if TYPE_CHECKING:
    from ssdctl.train.run import Run
    from ssdctl.train.schedule import TrainSchedule


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
    signals.install()  # not yet installed if another command, such as demo, runs this one
    if call.config.train.pipeline != "dali":  # DALI is slower with it
        tune_process()
    ranks, run = find_ranks(), run_dir(call.config)
    is_main = ranks.is_main
    if not ranks.is_single_process:
        start_rank_log(run.rank_log(ranks.rank), ranks.rank)
    call.console.quiet = call.console.quiet or not is_main  # only rank 0 writes to the terminal
    try:
        from ssdctl.cli.progress import TrainingDisplay
        from ssdctl.data.store_folder import dataset_folders, with_absolute_data
        from ssdctl.train.loop import run_training

        root, _ = dataset_folders(call.config.data)
        call.console.info(f"dataset {root}, run folder {run}")
        with TrainingDisplay(call.console) as display:
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
    ap = "no AP" if summary.best_ap is None else f"best AP {summary.best_ap:.3f}"
    trained = ""
    if summary.images_per_second:  # else the run was already finished
        trained = (
            f" in {summary.total_s:.0f} s, {summary.images_per_second:.1f} img/s, "
            f"{summary.peak_memory_bytes / 1e9:.1f} GB at most"
        )
    human = f"{summary.out}: {summary.step} steps{trained}, {ap}"
    call.console.result(summary._asdict(), human)


def _show_plan(call: Call) -> None:
    from ssdctl.config.devices import DEVICE_TYPES
    from ssdctl.data.dataset import COCO_NUM_CLASSES, COCO_NUM_IMAGES, WHAT_IS_DROPPED
    from ssdctl.data.open_dataset import count_trainable
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.train.run import finalize
    from ssdctl.train.weight_sources import check_weight_sources

    root, folder = dataset_folders(call.config.data)
    if not root.exists():
        images, classes = COCO_NUM_IMAGES, COCO_NUM_CLASSES
        if not call.config.train.fake_data:
            call.console.warning(
                f"{root}: no such dataset folder; the plan assumes COCO's {COCO_NUM_IMAGES:,} "
                "training images with boxes"
            )
    else:
        images, classes = count_trainable(root, folder)
    if not images:
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    ranks = find_ranks()
    network = None
    if call.config.train.init is not None:
        from ssdctl.train.setup import planned_network  # late: torch takes seconds

        network = planned_network(call.resolved)
    device = DEVICE_TYPES.get(call.config.train.device)
    run = finalize(call.resolved, device, ranks, images, network=network)
    for notice in run.notices:
        call.console.warning(notice)
    plan, config = run.plan, run.config
    check_weight_sources(config)
    needs = "" if call.console.as_json else _disk_needed(run, classes)
    recipe = run.rule or f"preset {config.train.preset}"
    workers, quota = config.train.workers or usable_cores(ranks.world_size), quota_cores()
    threads = f"{workers} per rank" + (f"; CPU quota: {quota} cores" if quota else "")
    table = _described(plan) + f"\n{'recipe':<20}{recipe}\n{'decode threads':<20}{threads}"
    result = {**plan.as_json(), "recipe": recipe, "workers": workers, "cpu_quota": quota}
    call.console.result(result, table + needs)


def _disk_needed(run: Run, classes: int) -> str:
    """Return a line about the disk space that the checkpoints need and the free space."""
    from ssdctl.files import free_bytes
    from ssdctl.train.schedule import checkpoint_bytes

    config = run.config
    each = checkpoint_bytes(config.model.backbone, classes + 1, config.train)
    kept = config.train.keep + 2
    return (
        f"\n{'checkpoints':<20}{each / 1e6:,.0f} MB each, "
        f"{kept * each / 1e9:.1f} GB at most "
        f"(--keep {config.train.keep}, the best, one being written); "
        f"{free_bytes(run.out.absolute()) / 1e9:,.0f} GB are free"
    )


def _too_large(plan: TrainSchedule) -> str:
    if plan.global_batch_size <= plan.images:
        return ""
    return ", more than there are images: a step uses some of them several times"


def _described(plan: TrainSchedule) -> str:
    rows = {
        "images": f"{plan.images:,}",
        "global batch": f"{plan.global_batch_size}{_too_large(plan)}",
        "steps per epoch": f"{plan.steps_per_epoch:,}",
        "total steps": f"{plan.total_steps:,} ({plan.epoch(plan.total_steps):.1f} epochs)",
        "warm-up steps": f"{plan.warmup_steps:,}",
        "peak learning rate": f"{plan.peak_lr:g}",
        "decay at steps": ", ".join(f"{step:,}" for step in plan.decay_steps) or "never",
    }
    return "\n".join(f"{name:<20}{value}" for name, value in rows.items())
