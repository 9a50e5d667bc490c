"""Settle a run: the only place that replaces a setting. Torch-free.

    run = finalize(resolved, device, ranks, images)
    run.plan.total_steps, run.config.train.lr

`train`, its dry run, the check of `launch`, `benchmark train`, `demo`, `doctor --self-test` and the
Python API call it, so that they agree. After it nothing writes a setting.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssdctl.config import Config, Resolved, TrainConfig
from ssdctl.config.resolve import Kind, Settled, Source, resolve
from ssdctl.config.settings import SettledConfig
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.input.batch import num_background
from ssdctl.runs.going_back import has_continued_from
from ssdctl.runs.layout import RunDir, run_dir
from ssdctl.training.schedule import (
    TrainSchedule,
    check_warmup,
    length_and_warmup,
    make_plan,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

    from ssdctl.config.fields import DeviceType
    from ssdctl.data.store import Split
    from ssdctl.device import Device
    from ssdctl.model.ssd300 import SSD300, Architecture

    DeviceFacts = Device | DeviceType  # opened, or only planned

INIT = Source(Kind.RULE, "checkpoint of --init")
SHORT_RUN = Source(Kind.RULE, "a tenth of the run")
CONTINUED = Source(Kind.FILE, "the run it continues")
SCHEDULE = (("train.warmup",), ("train.lr_decay", "train.decay_epochs"))  # chosen together
MAX_BACKGROUND = 0.5
FEW_IMAGES = 2500  # with fewer, 65 epochs at batch 32 are less than 5,000 steps
REFERENCE_BATCH = 8  # `Rule.peak_lr` is for this global batch
HIGHEST_LR = 2e-3  # AdamW, large batches
EVALUATIONS = 10
FEWEST_STEPS_BETWEEN_EVALUATIONS = 50
SMALL_BATCH = 8  # images per device; at 8 and above, updating batch-norm statistics was fine


class Network(NamedTuple):
    backbone: str
    extra_norm: str


class SettledRun(NamedTuple):
    resolved: Settled  # the precision is `auto` if the device is not open
    plan: TrainSchedule  # its images, its batch size, its steps
    out: Path
    rule: str | None  # the rule for few images, with the values that it changed
    notices: tuple[str, ...]  # warnings about what was replaced

    @property
    def config(self) -> SettledConfig:
        return self.resolved.config

    @property
    def precision(self) -> str:
        return self.config.train.precision


class OpenedRun(NamedTuple):
    """The parts of a run before its first step."""

    run: SettledRun
    device: Device
    ranks: Ranks
    train: Split
    val: Split | None
    val_rows: NDArray[np.int64] | None  # the images of `val` to score; None: all
    architecture: Architecture
    model: SSD300
    threads: int
    memory_hints: Callable[[], AbstractContextManager[None]]  # explains a full memory


def finalize(
    resolved: Resolved,
    device: DeviceFacts | None,
    ranks: Ranks,
    images: int,
    *,
    background: int | None = None,
    before: Config | None = None,
    network: Network | None = None,
    largest_batch: Callable[[Config], int] | None = None,
) -> SettledRun:
    """Replace `auto` and whatever the user left open by what fits device, data and checkpoint.

    Args:
        device: The device to train on; None for a plan without one.
        images: Training images with objects, before --limit-train and --overfit.
        background: Training images without objects; None: not known.
        before: The settings of the run to continue (`settings_of_run`); its schedule is kept.
        network: The network of the checkpoint of --init, or of the run to resume.
        largest_batch: Measures `--bs auto`, on an open device.

    Raises:
        UsageError: The device does not compute in the chosen precision; `--bs auto` without an open
            device, or one image for batch norm; the warm-up is longer than the run; --background
            without an image for it.
    """
    if resolved.is_chosen("train.warmup"):
        check_warmup(resolved.config.train)
    out = run_dir(resolved.config).path
    notices = []
    if device is not None:
        resolved, notice = settle_precision(resolved, device)
        notices += [notice] if notice else []
    if network is not None:
        resolved = _with_network(resolved, network)
    config = resolved.config.train
    share = _background_share(config, images, background or 0)
    images = min(images, config.limit_train or images, config.overfit or images)
    if config.batch_size == "auto":
        resolved = _with_largest_batch(resolved, images, ranks, largest_batch)
    settled, rule = _settle_recipe(resolved, images, ranks.world_size, share)
    if kept := _kept_schedule(settled, before):
        for path, value in kept.items():
            resolved = resolved.with_value(path, value, CONTINUED)
        settled, rule = _settle_recipe(resolved, images, ranks.world_size, share)
    _check_background(settled.config.train, background)
    plan = make_plan(settled.config.train, images, ranks.world_size)
    if kept and plan.is_cosine and plan.decay_steps[-1] < plan.total_steps:
        notices.append(
            f"the schedule of {out} ends at step {plan.decay_steps[-1]:,}: the learning rate stays "
            f"at {plan.lr(plan.total_steps):.3g} after it; --resume-changed fits it to "
            f"{plan.total_steps:,} steps, another --out starts a new run"
        )
    _check_batch_norm(settled.config, plan.batch_size, ranks)
    return SettledRun(settled, plan, out, rule, tuple(notices))


def _background_share(config: TrainConfig, images: int, background: int) -> float:
    """Return the share of images without objects that the rule for few images trains on."""
    if config.overfit is not None or not background:
        return 0.0
    return round(min(background / (images + background), MAX_BACKGROUND), 4)


def _check_background(config: TrainConfig, background: int | None) -> None:
    if background == 0 and config.background and not config.fake_data:
        raise UsageError(
            f"--background {config.background:g}: no training image is without objects",
            hint="list such images, with an empty label file each, or leave --background out",
        )


def settings_of_run(config: Config) -> Config | None:
    """Return the settings of the run that `config` continues; None if it starts one."""
    run, resume = run_dir(config), config.train.resume
    if resume not in ("auto", "never") and not has_continued_from(run, Path(resume)):
        run = RunDir(Path(resume).absolute().parent.parent)  # of RUN/checkpoints/FILE
    if resume != "never" and run.step_checkpoints():
        with contextlib.suppress(SsdctlError):  # the next start writes a broken file again
            return resolve(file=str(run.config), environment={}, default_file=False).config
    return None


def _kept_schedule(settled: Settled, before: Config | None) -> dict[str, Any]:
    """Return the schedule of the run to continue, where this call chooses none; empty if equal."""
    now = settled.config
    if before is None or now.train.resume_changed or before.train.preset != now.train.preset:
        return {}
    parts = [part for part in SCHEDULE if not settled.is_chosen(*part)]
    kept = {path: attrgetter(path)(before) for part in parts for path in part}
    is_same = all(value == attrgetter(path)(now) for path, value in kept.items())
    return {} if is_same else kept


def _settle_recipe(
    resolved: Resolved, images: int, world_size: int, background: float
) -> tuple[Settled, str | None]:
    """Apply the rule for few images, then shorten a warm-up that nobody chose if it is too long.

    The first steps of a preset that the user names are the same whatever --steps is.
    """
    settled, rule = adapt_to_data(Settled.of(resolved), images, world_size, background)
    images += num_background(images, settled.config.train.background)
    length, warmup = length_and_warmup(settled.config.train, images, world_size)
    if not settled.is_chosen("train.preset"):
        length = min(length, settled.config.train.steps or length)
    if warmup > length and not settled.is_chosen("train.warmup"):
        settled = settled.with_value("train.warmup", f"{max(length // 10, 1)}st", SHORT_RUN)
    return settled, rule


def _check_batch_norm(config: Config, batch_size: int, ranks: Ranks) -> None:
    """Check that batch norm of the last map, which is 1 x 1, has several values to average."""
    is_shared = config.train.sync_bn and not ranks.is_single_process
    if config.model.extra_norm == "batch" and batch_size == 1 and not is_shared:
        raise UsageError(
            "--bs 1: batch norm in the extra blocks (--extra-norm batch) needs several images",
            hint="--bs 2, or --extra-norm none",
        )


def check_without_data(resolved: Resolved, device: DeviceFacts) -> tuple[str, ...]:
    """Check what `finalize` would refuse whatever the dataset is; return its notices."""
    _, notice = settle_precision(resolved, device)
    if resolved.is_chosen("train.warmup"):
        check_warmup(resolved.config.train)
    return (notice,) if notice else ()


def settle_precision(resolved: Resolved, device: DeviceFacts) -> tuple[Resolved, str | None]:
    """Settle the precision; a preset's that the device lacks becomes the device's best.

    Returns:
        The settings, and a warning if a preset's value was replaced.

    Raises:
        UsageError: The user chose a precision that the device lacks.
    """
    requested, key = resolved.config.train.precision, "train.precision"
    if requested in device.precisions:
        return resolved, None
    best = device.auto_precision
    settled = resolved.with_value(key, best)
    if requested == "auto":
        return settled, None
    if resolved.is_chosen(key):
        flags = " or ".join(f"--{p}" for p in device.precisions)
        raise UsageError(
            f"device {device.name} does not support {requested}", hint=f"choose {flags}"
        )
    instead = "its best precision" if best == "auto" else best
    return settled, (
        f"{resolved.sources[key]} trains in {requested}, which device {device.name} lacks: "
        f"{instead} is used instead"
    )


def _with_network(resolved: Resolved, network: Network) -> Resolved:
    """Replace what neither the user nor a preset that the user named chose."""
    if resolved.is_chosen("train.preset"):
        return resolved
    for path, value in zip(("model.backbone", "model.extra_norm"), network, strict=True):
        if not resolved.is_chosen(path):
            resolved = resolved.with_value(path, value, INIT)
    return resolved


def _with_largest_batch(
    resolved: Resolved, images: int, ranks: Ranks, largest_batch: Callable[[Config], int] | None
) -> Resolved:
    """Measure `--bs auto` with the optimizer that the rule for few images would choose."""
    if largest_batch is None:
        raise UsageError(
            "--bs auto depends on the device's memory, and a plan does not open the device",
            hint="give a number, as in --bs 32",
        )
    any_size = Settled.of(resolved.with_value("train.batch_size", 1))
    trial, _ = adapt_to_data(any_size, images, ranks.world_size)
    return resolved.with_value("train.batch_size", largest_batch(trial.config))


class Rule(NamedTuple):
    """What replaces the recipe's values."""

    name: str
    fewest_samples: int  # images trained on, repetitions included
    fewest_epochs: int
    peak_lr: float  # at REFERENCE_BATCH; grows with the batch's square root


SMALL_DATA = Rule("small-data rule", fewest_samples=8000, fewest_epochs=20, peak_lr=1.4e-3)
FINE_TUNING = Rule("fine-tuning rule", fewest_samples=3000, fewest_epochs=10, peak_lr=1e-3)


def adapt_to_data(
    resolved: Settled, images: int, world_size: int, background: float = 0.0
) -> tuple[Settled, str | None]:
    """Apply the rule for few images or for fine-tuning to what the user left at its default.

    The default preset is a recipe for COCO: on 9 images it takes 18 steps. A preset that the user
    names is used as it is. docs/recipes.md describes the rules.

    Settings that belong together are only changed together: the optimizer with its rate and weight
    decay, the kind of decay with its epochs.

    Args:
        images: Training images with objects.
        background: Fraction of images without objects that the dataset offers.

    Returns:
        The settings, and a line with the rule's name, reason and changes, if it changed any.
    """
    config = resolved.config.train
    if resolved.is_chosen("train.preset") or images >= FEW_IMAGES or config.fake_data:
        return resolved, None
    rule = SMALL_DATA if config.init is None else FINE_TUNING
    values = _values(resolved, rule, images, world_size, background)
    if not values:
        return resolved, None
    for name, value in values.items():
        resolved = resolved.with_value(f"train.{name}", value, Source(Kind.RULE, rule.name))
    kind = "fine-tuning on" if config.init is not None else "only"
    changes = ", ".join(f"{name} {_text(value)}" for name, value in values.items())
    line = f"{rule.name} ({kind} {images:,} training images): {changes}"
    return resolved, line


def _values(
    resolved: Settled, rule: Rule, images: int, world_size: int, background: float
) -> dict[str, Any]:
    """Return the new values of those settings that the user did not set."""
    config = resolved.config.train
    values: dict[str, Any] = {}

    def is_open(*names: str) -> bool:
        return not resolved.is_chosen(*(f"train.{name}" for name in names))

    per_batch_size, batch_size = world_size * config.accumulate, config.batch_size
    if is_open("batch_size"):
        fewest = 2 if resolved.config.model.extra_norm == "batch" else 1
        values["batch_size"] = batch_size = max(REFERENCE_BATCH // per_batch_size, fewest)
    global_batch = batch_size * per_batch_size

    if background and is_open("background"):
        values["background"] = background
    else:
        background = config.background
    epoch_images = images + num_background(images, background)
    epochs = config.epochs
    if is_open("epochs"):
        samples = max(rule.fewest_samples, rule.fewest_epochs * images)
        run_epochs = (config.steps or 0) * global_batch / epoch_images
        values["epochs"] = epochs = math.ceil(max(samples / images, run_epochs))
    if is_open("optimizer", "lr", "momentum", "weight_decay"):
        peak = min(rule.peak_lr * math.sqrt(global_batch / REFERENCE_BATCH), HIGHEST_LR)
        values |= {
            "optimizer": "adamw",
            "weight_decay": 0.01,
            "lr": float(f"{peak * 32 / global_batch:.3g}"),
        }
    steps, end = max(int(epochs * epoch_images / global_batch), 1), float(epochs)
    run_steps = min(steps, config.steps or steps)
    if run_steps < steps:  # the schedule ends with the run; rounded up to the end of a step
        end = math.ceil(1e4 * run_steps * global_batch / epoch_images) / 1e4
    if is_open("warmup"):
        values["warmup"] = f"{max(run_steps // 20, 1)}st"
    if is_open("lr_decay", "decay_epochs"):
        values |= {"lr_decay": "cosine", "decay_epochs": (round(0.2 * end, 3), end)}
    if is_open("eval_every", "eval_at"):
        interval = max(run_steps // EVALUATIONS, FEWEST_STEPS_BETWEEN_EVALUATIONS)
        if interval < run_steps:
            values["eval_every"] = f"{interval}st"
    if rule is FINE_TUNING and batch_size < SMALL_BATCH and is_open("freeze_norm"):
        values["freeze_norm"] = True
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
