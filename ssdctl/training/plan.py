"""Plan a run: the only place that replaces a setting.

    plan = make_plan(config, device, ranks, dataset)
    plan.total_steps, plan.batch_size, plan.lr(step)

`train`, its dry run, the check of `launch`, `benchmark train`, `demo`, `doctor --self-test` and the
Python API call it, so that they agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ssdctl.config import Config
from ssdctl.config.fields import Tiling, augmentation_names
from ssdctl.config.resolve import Override, preset_overrides
from ssdctl.config.settings import DEFAULT, INIT, SHORT_RUN, Kind, Source, all_settings
from ssdctl.data.tiles import tiling_of
from ssdctl.errors import UsageError
from ssdctl.input import augmentations
from ssdctl.input.batch import num_background
from ssdctl.model.backbones import find_backbone
from ssdctl.runs.folder import run_dir
from ssdctl.runtime.plugins import AUGMENTATION_LISTS
from ssdctl.runtime.safe_text import counted
from ssdctl.training.small_data import adapt_to_data, short_warmup

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import Checkpoint
    from ssdctl.config.fields import DeviceType
    from ssdctl.data.open_dataset import DatasetSize
    from ssdctl.device import Device
    from ssdctl.distributed import Ranks

    DeviceFacts = Device | DeviceType  # opened, or only planned
    from ssdctl.config import TrainConfig

COSINE_FLOOR = 0.01  # Habana-TF adds it to the cosine: 1.01 before the decay, 0.01 at the end
DECAY_FACTOR = 0.1
MAX_EVALUATIONS = 10_000  # that are counted
MAX_BACKGROUND = 0.5
LEAVE_IT_OUT = "leave it out"
AUGMENTATION = ["train.augment", "train.hue_degrees"]
EVALUATION = ["train.eval_every", "train.eval_at", "train.patience", "train.target_ap"]
EVALUATED_WITH = [f"evaluate.{name}" for name in ("batch_size", "score_threshold", "nms_iou")]
CONTINUED = Source(Kind.FILE, "the run it continues")
SCHEDULE = (("train.warmup",), ("train.lr_decay", "train.decay_epochs"))  # chosen together


class Network(NamedTuple):
    """What a run takes from the checkpoint of `--init` besides the weights."""

    backbone: str
    extra_norm: str
    tiling: Tiling | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run before it starts: its settings, without `auto`, and what follows from them.

    With `images` in an epoch and a global batch of G, epoch e ends at step e * images / G, rounded
    down: samples form one endless stream (docs/recipes.md), so an epoch need not end with a step.
    """

    config: Config  # the precision is `auto` if the device is not open
    out: Path
    trainable: int  # training images with objects, after --limit-train and --overfit
    world_size: int
    rule: str | None = None  # the rule for few images, with the values that it changed
    notices: tuple[str, ...] = ()  # warnings about what was replaced

    def with_value(self, path: str, value: Any, source: Source | None = None) -> Plan:
        return dataclasses.replace(self, config=self.config.with_value(path, value, source))

    @property
    def precision(self) -> str:
        return self.config.train.precision

    @property
    def batch_size(self) -> int:
        """Images per rank and micro-batch."""
        return int(self.config.train.batch_size)

    @property
    def global_batch_size(self) -> int:
        return self.batch_size * self.world_size * self.config.train.accumulate

    @cached_property
    def background(self) -> int:
        """Images of an epoch without objects."""
        return num_background(self.trainable, self.config.train.background)

    @cached_property
    def images(self) -> int:
        """Images of an epoch."""
        return self.trainable + self.background

    @property
    def steps_per_epoch(self) -> int:
        return max(self.images // self.global_batch_size, 1)

    @property
    def recipe_steps(self) -> int:
        """Steps of all epochs. `--steps` ends a run earlier and changes nothing before."""
        return max(self.step_at(self.config.train.epochs), 1)

    @cached_property
    def total_steps(self) -> int:
        return min(self.recipe_steps, self.config.train.steps or self.recipe_steps)

    @cached_property
    def warmup_steps(self) -> int:
        value, unit = split_duration(self.config.train.warmup)
        return int(value) if unit == "st" else self.step_at(value)

    @cached_property
    def base_lr(self) -> float:
        return self.config.train.lr * self.global_batch_size / 32

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up."""
        return self.base_lr * (1 + COSINE_FLOOR * self.is_cosine)

    @cached_property
    def decay_steps(self) -> tuple[int, ...]:
        return tuple(map(self.step_at, self.config.train.decay_epochs))

    @property
    def first_decay(self) -> int:
        """The step at which the learning rate begins to decay, at least 1; without, the last."""
        return max(min(self.decay_steps, default=self.recipe_steps), 1)

    @property
    def is_cosine(self) -> bool:
        return self.config.train.lr_decay == "cosine"

    def step_at(self, epoch: float) -> int:
        """Return the last step of the first `epoch` epochs, which may be after the run."""
        return int(Fraction(str(epoch)) * self.images / self.global_batch_size)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 0.

        The warm-up is linear from 0, so the first step of a warm-up changes no weight.
        """
        if step < self.warmup_steps:
            return self.peak_lr * step / self.warmup_steps
        if self.is_cosine:
            start, end = self.decay_steps
            progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
            return self.base_lr * (0.5 * (1 + math.cos(math.pi * progress)) + COSINE_FLOOR)
        return self.peak_lr * DECAY_FACTOR ** sum(step >= decay for decay in self.decay_steps)

    def epoch(self, step: int) -> float:
        return step * self.global_batch_size / self.images

    def epochs_ended(self, step: int) -> int:
        """Return the number of epochs that ended with `step` or before it."""
        if step < 1:
            return 0
        return -(-(step + 1) * self.global_batch_size // self.images) - 1

    def every(self, duration: str) -> Every:
        """Return the interval of a setting such as `--save-every`; at least a step."""
        value, unit = split_duration(duration)
        if unit == "min":
            return Every(None, value * 60)
        steps = Fraction(int(value))
        if unit == "ep":
            steps = Fraction(str(value)) * self.images / self.global_batch_size
        return Every(max(steps, Fraction(1)), None)

    def next_evaluation(self, step: int) -> int:
        """Return the first step after `step` that is evaluated; the last one always is."""
        config, steps = self.config.train, [self.total_steps]
        steps += [max(self.step_at(epoch), 1) for epoch in config.eval_at]
        if config.eval_every and (due := self.every(config.eval_every).after(step)) is not None:
            steps.append(due)
        return min((s for s in steps if s > step), default=self.total_steps)

    def evaluates_at(self, step: int) -> bool:
        return self.next_evaluation(step - 1) == step

    def evaluations_after(self, step: int) -> list[int]:
        """Return the steps after `step` with which an evaluation follows."""
        steps: list[int] = []
        while step < self.total_steps and len(steps) < MAX_EVALUATIONS:
            step = self.next_evaluation(step)
            steps.append(step)
        return steps

    def step_of(self, checkpoint: Checkpoint) -> int:
        """Return a checkpoint's step; with another global batch, that with as many samples."""
        if checkpoint.global_batch == self.global_batch_size:
            return checkpoint.step
        return checkpoint.samples_seen // self.global_batch_size

    def checkpoint_bytes(self, num_classes: int) -> int:
        """Return the approximate size of a checkpoint: weights, EMA, optimizer state."""
        config = self.config.train
        copies = 1 + bool(config.ema) + (2 if config.optimizer == "adamw" else 1)
        shared, per_class = find_backbone(self.config.model.backbone).PARAMETERS
        return 4 * copies * (shared + num_classes * per_class)

    def idle_settings(self) -> Iterator[tuple[Sequence[str], str, str]]:
        """Yield settings that change nothing in this run, why, and what to do with the option."""
        config = self.config.train
        if config.fake_data:
            reason = "does nothing with --fake-data, which reads and evaluates no image"
            yield [*AUGMENTATION, *EVALUATION, "train.fold"], reason, LEAVE_IT_OUT
        if config.overfit is not None:
            yield AUGMENTATION, "does nothing: --overfit trains on plain images", LEAVE_IT_OUT
        names = augmentation_names(config.augment)
        if set(names) <= {*AUGMENTATION_LISTS["ssd-zoom"]} - {"color"}:  # a plugin may use it
            yield (
                ["train.hue_degrees"],
                f"does nothing with --augment {config.augment}",
                LEAVE_IT_OUT,
            )
        if not self.background:
            reason = "does nothing: the run has no images without objects"
            yield (
                ["train.background_negatives"],
                reason,
                "leave it out, or add --background FRACTION",
            )
        if config.init is not None and self.config.model.weights != "none":
            yield ["model.weights"], "does nothing: --init has all weights", LEAVE_IT_OUT
        if config.execution == "eager":
            yield ["train.overlap_gradients"], "does nothing with --execution eager", LEAVE_IT_OUT
        if not {*config.tracker} - {"tensorboard"}:
            reason = "does nothing without a tracker that keeps files"
            yield ["train.upload_checkpoints"], reason, "add --tracker wandb or mlflow"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers that `train --dry-run --json` prints."""
        return {
            "images": self.images,
            "background": self.background,
            "global_batch_size": self.global_batch_size,
            "steps_per_epoch": self.steps_per_epoch,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
            "peak_lr": self.peak_lr,
            "decay_steps": list(self.decay_steps),
        }


def make_plan(
    config: Config,
    device: DeviceFacts | None,
    ranks: Ranks,
    dataset: DatasetSize,
    *,
    before: Config | None = None,
    largest_batch: int | None = None,
) -> Plan:
    """Choose values for all settings that are `auto` or not set by the user.

    Args:
        device: The device to train on; None for a plan without one.
        before: The settings of the run to continue (`continued_config`): its schedule is kept, and
            the precision that it had chosen.
        largest_batch: The batch size for `--bs auto`, measured on an open device.

    Raises:
        UsageError: The device does not compute in the chosen precision; `--bs auto` without
            `largest_batch`, or one image for batch norm; the warm-up is longer than the run;
            --background without an image for it.
    """
    config = unfitted(config, has_init=config.train.init is not None)
    out, notices = run_dir(config).path, check_settings(config, device)
    config = _with_precision(config, device, before)
    share = _background_share(config, dataset)
    if config.train.batch_size == "auto":
        config = config.with_value("train.batch_size", _measured(largest_batch))
    limits = config.train.limit_train, config.train.overfit
    trainable = min([dataset.trainable, *(limit for limit in limits if limit)])
    if any(limit and limit > dataset.trainable for limit in limits):
        number = counted(trainable, "image")
        notices += (f"--limit-train or --overfit: only {number} with objects can be trained on",)
    first = Plan(config, out, trainable, ranks.world_size, notices=notices)
    plan = _adapted(first, share)
    if kept := _kept_schedule(plan.config, before):
        for path, value in kept.items():
            first = first.with_value(path, value, CONTINUED)
        plan = _adapted(first, share)
    _check(plan, dataset)
    return plan


def unfitted(config: Config, *, has_init: bool = False) -> Config:
    """Return the config without what a rule chose for the run whose config file was read.

    Args:
        has_init: The network of `--init` is this run's: see `with_network`.
    """
    recipe = {override.path: override for override in preset_overrides(config.train.preset)}
    for path, source in config.sources.items():
        if source.kind is Kind.RULE and not (has_init and source == INIT):
            plain = recipe.get(path, Override(path, all_settings()[path].default, DEFAULT))
            config = config.with_value(path, plain.value, plain.source)
    return config


def check_settings(config: Config, device: DeviceFacts | None) -> tuple[str, ...]:
    """Check what `make_plan` would refuse for any dataset; return its notices."""
    augmentations.load(config.train.augment)
    if (log := config.train.mllog) is not None and Path(log).is_dir():
        raise UsageError(f"--mllog {log}: a folder", hint="name a file in it")
    if config.is_chosen("train.warmup"):
        _check_unit_of_warmup(config.train)
    requested, key = config.train.precision, "train.precision"
    if device is None or requested == "auto" or requested in device.precisions:
        return ()
    if config.is_chosen(key):
        flags = " or ".join(f"--{p}" for p in device.precisions)
        raise UsageError(
            f"device {device.name} does not support {requested}", hint=f"choose {flags}"
        )
    best = device.auto_precision
    instead = "its best precision" if best == "auto" else best
    return (
        f"{config.sources[key]} trains in {requested}, which device {device.name} lacks: "
        f"{instead} is used instead",
    )


def check_shares(batch_size: int, cores: int, device_name: str) -> None:
    """Raise UsageError if the cores of a device cannot share the batch equally."""
    if batch_size % cores:
        nearest = max(batch_size - batch_size % cores, cores)
        raise UsageError(
            f"--bs {batch_size}: the {cores} cores of device {device_name} cannot share it equally",
            hint=f"--bs {nearest} is a multiple of {cores}",
        )


def _with_precision(config: Config, device: DeviceFacts | None, before: Config | None) -> Config:
    if device is None:
        return config
    kept: str = "auto"
    if before is not None and not config.train.resume_changed:
        kept = before.train.precision
    if kept == "auto":
        kept = device.auto_precision
    elif kept not in device.precisions:
        raise UsageError(
            f"the run to continue trains in {kept}, which device {device.name} lacks",
            hint="--resume-changed continues it in another precision",
        )
    is_known = config.train.precision in device.precisions
    return config if is_known else config.with_value("train.precision", kept)


def with_network(config: Config, network: Network) -> Config:
    """Take the network and the tiles of `--init`, unless the user chose other tiles.

    Raises:
        UsageError: The user, or a named preset, chose another network.
    """
    config = unfitted(config)
    for path in ("model.backbone", "model.extra_norm"):
        value = getattr(network, path.partition(".")[2])
        if not config.is_chosen(path, "train.preset"):
            config = config.with_value(path, value, INIT)
        elif (chosen := attrgetter(path)(config)) != value:
            raise UsageError(
                f"{config.sources[path]}: {path} is {chosen}, but --init {config.train.init} has a "
                f"network with {value}",
                hint=f"--backbone {network.backbone} --extra-norm {network.extra_norm}",
            )
    tiling = network.tiling and tiling_of(config, network.tiling)
    if tiling is None:
        return config
    for path, value in (("data.tile", tiling.size), ("data.tile_overlap", tiling.overlap)):
        if not config.is_chosen(path):
            config = config.with_value(path, value, INIT)
    return config


def _measured(largest_batch: int | None) -> int:
    if largest_batch is None:
        raise UsageError(
            "--bs auto depends on the device's memory, and a plan does not open the device",
            hint="give a number, as in --bs 32",
        )
    return largest_batch


def _background_share(config: Config, dataset: DatasetSize) -> float:
    """Return the share of images without objects that the rule for few images trains on."""
    if config.train.overfit is not None or not dataset.background:
        return 0.0
    share = dataset.background / (dataset.trainable + dataset.background)
    return round(min(share, MAX_BACKGROUND), 4)


def _adapted(plan: Plan, background: float) -> Plan:
    """Apply the rule for few images; shorten a default warm-up that ends after the decay begins.

    The first steps of a preset that the user names are the same whatever --steps is.
    """
    config, rule = adapt_to_data(plan.config, plan.trainable, plan.world_size, background)
    plan = dataclasses.replace(plan, config=config, rule=rule)
    is_named = plan.config.is_chosen("train.preset")
    length = plan.recipe_steps if is_named else plan.total_steps
    length = min(length, plan.first_decay)
    if plan.warmup_steps > length and not plan.config.is_chosen("train.warmup"):
        plan = plan.with_value("train.warmup", f"{short_warmup(length, 10)}st", SHORT_RUN)
    return plan


def _kept_schedule(now: Config, before: Config | None) -> dict[str, Any]:
    """Return the schedule of the run to continue, where this call chooses none; empty if equal."""
    if before is None or now.train.resume_changed or before.train.preset != now.train.preset:
        return {}
    parts = [part for part in SCHEDULE if not now.is_chosen(*part)]
    kept = {path: attrgetter(path)(before) for part in parts for path in part}
    is_same = all(value == attrgetter(path)(now) for path, value in kept.items())
    return {} if is_same else kept


def is_of_detectors(path: str) -> bool:
    """Return whether a setting is for trained detectors: a training does not read it."""
    return path.startswith(("evaluate.", "predict.")) and path not in EVALUATED_WITH


def refuse_settings_of_detectors(config: Config) -> None:
    """Raise UsageError if the call has such settings, which files and variables may have."""
    idle = [path for path in config.sources if is_of_detectors(path)]
    hint = "leave it out: `ssdctl evaluate` and `ssdctl predict` take such settings"
    config.require_not_given(idle, "does nothing in a training", hint)


def _check(plan: Plan, dataset: DatasetSize) -> None:
    config = plan.config.train
    if dataset.background == 0 and config.background and not config.fake_data:
        raise UsageError(
            f"--background {config.background:g}: no training image is without objects",
            hint="list such images, with an empty label file each, or leave --background out",
        )
    for idle in plan.idle_settings():
        plan.config.require_not_given(*idle)
    _check_warmup_steps(plan)
    _check_batch_norm(plan)


def _check_warmup_steps(plan: Plan) -> None:
    total, text = plan.recipe_steps, plan.config.train.warmup
    if plan.warmup_steps <= total:
        return
    value, unit = split_duration(text)
    hint = f"give a shorter one, such as --warmup {max(total // 10, 1)}st"
    if unit == "ep" and value.is_integer() and value <= total:
        hint = f"--warmup {value:.0f}st if these are iterations, as in NVIDIA's program"
    raise UsageError(
        f"a warm-up of {text} is {plan.warmup_steps} steps, the run has {total}", hint=hint
    )


def _check_batch_norm(plan: Plan) -> None:
    """Check that batch norm of the last map, which is 1 x 1, has several values to average."""
    is_shared = plan.config.train.sync_bn and plan.world_size > 1
    if plan.config.model.extra_norm == "batch" and plan.batch_size == 1 and not is_shared:
        raise UsageError(
            "--bs 1: batch norm in the extra blocks (--extra-norm batch) needs several images",
            hint="--bs 2, or --extra-norm none",
        )


class Every(NamedTuple):
    """An interval between two actions: optimizer steps, or seconds.

    Steps are fractional, so that the n-th action is at the end of the n-th epoch without drift:
    95 images in batches of 4 end their epochs at steps 23, 47, 71.
    """

    steps: Fraction | None
    seconds: float | None

    def after(self, step: int) -> int | None:
        """Return the first later step with which a period ends, rounded down; None for seconds."""
        if self.steps is None:
            return None
        return math.floor(math.ceil((step + 1) / self.steps) * self.steps)

    def is_due(self, step: int) -> bool:
        """Return whether a period ends with this step; never for seconds."""
        return self.after(step - 1) == step


def split_duration(text: str) -> tuple[float, str]:
    """Parse a duration: `3` -> (3.0, "ep"); `300st` -> (300.0, "st"); `10min` -> (10.0, "min")."""
    for unit in ("ep", "st", "min"):
        if text.endswith(unit):
            return float(text.removesuffix(unit)), unit
    return float(text), "ep"


def _check_unit_of_warmup(config: TrainConfig) -> None:
    """Refuse a warm-up that may be in iterations, as other programs count it.

    Raises:
        UsageError: It has no unit and, as epochs, ends after the recipe's decay.
    """
    text = config.warmup
    if text.isdecimal() and int(text) > min(config.decay_epochs, default=int(text)):
        raise UsageError(
            f"--warmup {text}: epochs, or iterations, as in NVIDIA's program?",
            hint=f"--warmup {text}st if they are iterations; --warmup {text}ep if epochs",
        )
