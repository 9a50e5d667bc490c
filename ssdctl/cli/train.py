"""`ssdctl train`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.console import Console, aligned
from ssdctl.data.store_folder import with_absolute_paths
from ssdctl.distributed import Ranks, find_ranks, require_port
from ssdctl.distributed.rank_process import start_rank_log
from ssdctl.errors import DataError, SsdctlError, Stopped
from ssdctl.runs.folder import RunDir, run_dir
from ssdctl.runtime import signals
from ssdctl.runtime.progress import duration
from ssdctl.runtime.safe_text import counted, quoted
from ssdctl.runtime.system import processor, quota_cores, tune_process, usable_cores

if TYPE_CHECKING:
    from ssdctl.config import Config
    from ssdctl.config.fields import DeviceType
    from ssdctl.data.open_dataset import DatasetSize
    from ssdctl.training.observers import Summary
    from ssdctl.training.observers.display import Display
    from ssdctl.training.plan import Plan

AUTO_PRECISION = "auto (bf16; on GPUs before compute capability 8.0 fp16)"
MAX_SIMILAR = 10  # runs whose speed may be known
MEASURED_BATCH = 2  # images; a step of 8 takes four times as long on a CPU


@command(
    "train",
    panel="Train",
    settings="data.* model.* train.*",
    short=(
        "--data --out --init --preset --epochs --bs --lr --device --bf16 --fp16 --fp32 "
        "--resume --eval-every --dry-run"
    ),
    examples=[
        "ssdctl train --data photos",
        "ssdctl train --data photos --dry-run   # the plan: network, length, time, recipe",
        "ssdctl train --data photos --init ssd300-vgg16-coco   # from a detector of COCO",
        "ssdctl train --data /data/coco --preset nvidia-r50 --bs 64 --bf16",
        "ssdctl train --fake-data --steps 100 --warmup 10st   # the device's speed, no dataset",
    ],
)
def train(
    call: Call,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the plan without training", rich_help_panel="Run")
    ] = False,
) -> None:
    """Train a detector, or resume a stopped run.

    Ctrl-C and SIGTERM save the run and exit with 75; run the same command again to continue. A
    second Ctrl-C exits immediately.
    """
    from ssdctl.training.plan import refuse_settings_of_detectors

    refuse_settings_of_detectors(call.config)
    if dry_run:
        _show_plan(call)
        return
    signals.install()  # not yet installed if another command, such as demo, runs this one
    if call.config.train.pipeline != "dali":  # DALI is slower with it
        tune_process()
    ranks, run = find_ranks(), run_dir(call.config)
    if not ranks.is_single_process:
        require_port()  # on the terminal: only rank 0 writes to it from here on
        start_rank_log(run.rank_log(ranks.rank), ranks.rank)
    # Only rank 0 writes to the terminal.
    call.console.quiet = call.console.quiet or not ranks.is_main
    try:
        from ssdctl.training.trainer import Trainer

        trainer = Trainer(config=call.config, observers=[_display(call.console)])
        with signals.announced(call.console.info), trainer:
            start = trainer.step
            trainer.run()
            summary = trainer.summary()
        if ranks.is_main:
            _print_summary(call, summary, start)
    except Stopped as stop:
        if ranks.is_main:
            raise
        raise SystemExit(stop.exit_code) from None
    finally:
        signals.restore()


def _display(console: Console) -> Display:
    from ssdctl.training.observers.display import Display

    return Display(
        console.facts,
        console.info,
        progress=console.progress,
        is_live=console.live,
        is_verbose=console.verbose,
    )


def _print_summary(call: Call, summary: Summary, start: int) -> None:
    from ssdctl.runs.run import Run

    run = RunDir(Path(summary.out))
    ap = "no AP" if summary.best_ap is None else f"best AP {summary.best_ap:.3f}"
    trained = ""
    if summary.images_per_second:  # else the run was already finished
        trained = f", the last {summary.step - start}" * bool(start) + (
            f" in {duration(summary.total_s)}, {summary.images_per_second:.1f} img/s, "
            f"peak memory {summary.peak_memory_bytes / 1e9:.1f} GB"
        )
    call.console.result(summary._asdict(), f"{run.path}: {summary.step} steps{trained}, {ap}")
    facts = [("last", f"{run.last} (step {summary.step:,})")]
    best = Run(run.path).best_metrics if run.best.is_file() else None
    if best is not None and best["AP"] >= 0:
        facts = [("best", f"{run.best} (AP {best['AP']:.3f}, step {best['step']:,.0f})")]
    facts.append(("wrote", f"{run.path} (checkpoints, metrics.jsonl, config.toml)"))
    path = quoted(run.path)
    commands = [f"ssdctl predict {path} photo.jpg --out drawn"]
    if best is not None:
        commands.append(f"ssdctl report {path}")
    commands.append(f"ssdctl export {path} --format onnx --out detector.onnx")
    call.console.closing(facts, commands)


def _show_plan(call: Call) -> None:
    from ssdctl.data.dataset import WHAT_IS_DROPPED

    if call.config.train.init is not None:
        from ssdctl.training.setup import planned_config  # late: torch takes seconds

        call = call._replace(config=planned_config(with_absolute_paths(call.config)))
    root, size = _dataset_size(call)
    if not size.trainable:
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    device = _device(call.config.train.device)
    plan, step = _plan(call, device, size)
    size = _as_evaluated(size, plan)
    _warn_of_plan(call, plan, root, size, step)
    workers = plan.config.train.workers or usable_cores(find_ranks().world_size)
    if call.console.as_json:
        recipe = plan.rule or f"preset {plan.config.train.preset}"
        evaluations = len(plan.evaluations_after(step)) if size.validation else 0
        more = {"evaluations": evaluations, "recipe": recipe}
        more |= {"workers": workers, "cpu_quota": quota_cores()}
        call.console.result({**plan.as_json(), **more})
        return
    rows = _plan_rows(call, plan, device, size, workers, step)
    call.console.result(None, aligned(list(rows.items())))


def plan_and_check(
    config: Config, device: DeviceType | None, ranks: Ranks, size: DatasetSize
) -> tuple[Plan, int]:
    """Plan a run, and check what it reads at its start; nothing is written.

    Returns:
        The plan, and the step that the run continues from.
    """
    from ssdctl.checkpoint.locate import continued_config
    from ssdctl.training.plan import make_plan

    plan = make_plan(config, device, ranks, size, before=continued_config(config))
    return plan, _first_step(plan, size)


def _plan(call: Call, device: DeviceType, size: DatasetSize) -> tuple[Plan, int]:
    """Plan for the device; for any device if only the precision is chosen."""
    config = with_absolute_paths(call.config)
    device.choose_execution(config.train.execution)
    is_any = config.train.device == "auto" and config.is_chosen("train.precision")
    plan, step = plan_and_check(config, None if is_any else device, find_ranks(), size)
    for notice in plan.notices:
        call.console.warning(notice)
    if config.train.init is not None and not step:
        from ssdctl.training.setup import planned_warning_of_init

        if (warning := planned_warning_of_init(config)) is not None:
            call.console.warning(warning)
    if is_any and plan.precision not in ("auto", *device.precisions):
        call.console.warning(
            f"{device.name}, the device of this machine, does not compute in {plan.precision}: "
            "the plan is for another one"
        )
    return plan, step


def _first_step(plan: Plan, size: DatasetSize) -> int:
    """Check what a run reads at its start; return the step that it continues from."""
    from ssdctl.checkpoint.locate import check_weight_sources
    from ssdctl.training.observers.trackers import find_trackers

    train = plan.config.train
    find_trackers(train)
    check_weight_sources(plan.config)
    if train.pipeline == "dali":
        from ssdctl.input.open import check_pipeline  # late: torch takes seconds

        check_pipeline(train.pipeline, train.augment)
    if RunDir(plan.out).is_started() or train.resume not in ("auto", "never"):
        from ssdctl.data.annotations import ClassName
        from ssdctl.training.resume import find_checkpoint

        names = [ClassName(None, name) for name in size.classes]
        # No group of processes is open.
        checkpoint = find_checkpoint(plan, names or None, Ranks(0, 1, 0))
        return 0 if checkpoint is None else plan.step_of(checkpoint)
    return 0


def _as_evaluated(size: DatasetSize, plan: Plan) -> DatasetSize:
    """Return the size with the images that the run evaluates on as validation images."""
    train = plan.config.train
    if not (train.fake_data or train.overfit):
        return size
    trained_on = plan.trainable + min(plan.background, size.background or 0)
    return size._replace(validation=0 if train.fake_data else trained_on, warnings=())


def _warn_of_plan(call: Call, plan: Plan, root: Path, size: DatasetSize, step: int) -> None:
    from ssdctl.data.dataset import warning_without_validation
    from ssdctl.data.sources import has_dataset
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.training import description

    folders = dataset_folders(call.config.data)
    if not size.validation and has_dataset(*folders) and not plan.config.train.fake_data:
        num_images = size.trainable + (size.background or 0)
        call.console.warning(warning_without_validation(*folders, num_images))
    for warning in (*size.warnings, *description.warnings_of_unreached(plan, step)):
        call.console.warning(warning)


def _plan_rows(
    call: Call, plan: Plan, device: DeviceType, size: DatasetSize, workers: int, step: int
) -> dict[str, str]:
    from ssdctl.data.coco_json import COCO_NUM_CLASSES
    from ssdctl.training import description

    train, quota = plan.config.train, quota_cores()
    classes = len(size.classes) or COCO_NUM_CLASSES
    auto = " (auto)" * (call.config.train.device == "auto")
    precision = AUTO_PRECISION if plan.precision == "auto" else plan.precision
    repeated = ", more than there are images: a step uses some of them several times"
    repeated *= plan.global_batch_size > plan.images
    rows = description.facts(
        plan, size.classes, size.validation, f"{device.name}{auto}, precision {precision}", step
    )
    rows |= {
        "time": _time(call, plan, device.name, size.validation, classes, step),
        "to stop": "Ctrl-C at any time: the run is saved, and the same command continues it",
        "batch": f"{plan.global_batch_size}{repeated}; "
        f"{counted(plan.steps_per_epoch, 'step')} per epoch",
        "learning rate": f"{plan.peak_lr:g} after the warm-up = --lr {train.lr:g} "
        f"(for a batch of 32) x {plan.global_batch_size} / 32{' x 1.01 (cosine)' * plan.is_cosine}",
        "warm-up steps": f"{plan.warmup_steps:,}",
        "decode threads": f"{workers} per rank" + (f"; CPU quota: {quota} cores" if quota else ""),
        "decay at steps": ", ".join(f"{step:,}" for step in plan.decay_steps) or "never",
        "checkpoints": _disk_needed(plan, classes),
        "run": str(plan.out),
    }
    if call.console.verbose and (details := description.details(plan)):
        rows["details"] = details
    return rows


def _dataset_size(call: Call) -> tuple[Path, DatasetSize]:
    """Return the dataset and its size; COCO's size if no dataset is named or read."""
    from ssdctl.data.coco_json import COCO_NUM_IMAGES
    from ssdctl.data.open_dataset import DatasetSize, count_images
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.data.tiles import tiling_of

    root, folder = dataset_folders(call.config.data)
    root = root.absolute() if call.config.data.root else root
    if root.exists() or (call.config.data.root and not call.config.train.fake_data):
        folds, tiling = (call.config.train.fold, call.config.train.group), tiling_of(call.config)
        return root, count_images(root, folder, tiling, *folds, call.config.prepare)
    if not call.config.train.fake_data:
        call.console.warning(
            f"no --data, and no dataset in {root}: the plan assumes COCO's {COCO_NUM_IMAGES:,} "
            "training images with boxes"
        )
    return root, DatasetSize(COCO_NUM_IMAGES, None, 0, [])


def _device(name: str) -> DeviceType:
    from ssdctl.config.fields import device_type
    from ssdctl.runtime.hardware import find_hardware

    found = find_hardware()
    if name == "auto":
        name = "cuda" if found.num_nvidia else "hpu" if found.num_gaudi else "cpu"
    if name != "cpu":
        return device_type(name)
    return device_type(name)._replace(auto_precision="bf16" if processor()[1] else "fp32")


def _time(call: Call, plan: Plan, device: str, val_images: int, classes: int, step: int) -> str:
    """Return how long the run takes from a step, by an earlier run or, on a terminal, measured."""
    from ssdctl.training.observers.display import EVALUATION_COST

    if step >= plan.total_steps:
        return "nothing left to train"
    evaluations = len(plan.evaluations_after(step)) * val_images
    images = (plan.total_steps - step) * plan.global_batch_size + EVALUATION_COST * evaluations
    if (known := _known_rate(plan, device)) is not None:
        rate, source = known[0], f"in {known[1]}"
    elif call.console.live and device == "cpu" and find_ranks().is_single_process:
        call.console.info("Measuring training steps...")
        from ssdctl.benchmark.train import seconds_per_step  # late: torch takes seconds
        from ssdctl.checkpoint.format import Architecture
        from ssdctl.device import open_device

        model, config, size = plan.config.model, plan.config.train, MEASURED_BATCH
        architecture = Architecture(model.backbone, model.extra_norm, classes + 1)
        opened = open_device(device, execution=config.execution)
        rate = size / seconds_per_step(architecture, config, opened, plan.precision, size)
        source = "measured now"
    else:
        return "unknown before a first run; `ssdctl benchmark train` measures the speed"
    return f"about {duration(images / rate)} on this machine, {rate:.1f} img/s {source}"


def _known_rate(plan: Plan, device: str) -> tuple[float, Path] | None:
    """Return images per second of this run, or else of a similar one.

    That is the newest run of `runs/` with the same network and precision, on as many devices.
    """
    from ssdctl.runs.run import Run, newest_runs

    ours = plan.config.model.backbone, plan.precision, find_ranks().world_size, device == "cpu"
    for known in map(Run, (plan.out, *newest_runs()[:MAX_SIMILAR])):
        try:
            settings, environment, steps = known.settings, known.environment, known.train
        except SsdctlError:
            continue
        rate = steps[-1]["images_per_second"] if steps else 0.0
        if environment is None or not rate:
            continue
        theirs = (
            settings.get("model.backbone"),
            settings.get("train.precision"),
            environment.world_size,
            environment.device == processor()[0],
        )
        if known.path == plan.out or theirs == ours:
            return rate, known.path
    return None


def _disk_needed(plan: Plan, classes: int) -> str:
    from ssdctl.files import free_bytes

    each, keep = plan.checkpoint_bytes(classes + 1), plan.config.train.keep
    kept = keep + 2
    return (
        f"{each / 1e6:,.0f} MB each, {max(kept * each / 1e9, 0.1):.1f} GB at most "
        f"(--keep {keep}, the best, one being written); "
        f"{free_bytes(plan.out.absolute()) / 1e9:,.0f} GB free"
    )
