"""Settle a run: the only place that replaces a setting. Torch-free.

    run = finalize(resolved, device, ranks, images)
    run.plan.total_steps, run.config.train.lr

`train`, its dry run, the check of `launch`, `benchmark train`, `demo`, `doctor --self-test` and the
Python API call it, so that they agree. After it nothing writes a setting.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ssdctl.config import Config, Resolved, TrainConfig
from ssdctl.config.sources import Kind, Source
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import UsageError
from ssdctl.runs.default_folder import run_dir
from ssdctl.training.schedule import TrainSchedule, check_warmup, make_plan
from ssdctl.training.small_data import adapt_to_data

INIT = Source(Kind.RULE, "checkpoint of --init")


class DeviceFacts(Protocol):
    """What settling a run needs of a device, opened (`Device`) or only planned (`DeviceType`)."""

    @property
    def name(self) -> str: ...
    @property
    def precisions(self) -> tuple[str, ...]: ...
    @property
    def auto_precision(self) -> str: ...


class Network(NamedTuple):
    """The network of a checkpoint."""

    backbone: str
    extra_norm: str


class SettledRun(NamedTuple):
    """A settled run."""

    resolved: Resolved  # without `auto`, except for the precision of a device that is not open
    plan: TrainSchedule  # its images, its batch size, its steps
    out: Path
    rule: str | None  # the rule for few images, with the values that it changed
    notices: tuple[str, ...]  # warnings about what was replaced

    @property
    def config(self) -> Config:
        """The settings."""
        return self.resolved.config

    @property
    def precision(self) -> str:
        """The precision of the network."""
        return self.config.train.precision


def finalize(
    resolved: Resolved,
    device: DeviceFacts | None,
    ranks: Ranks,
    images: int,
    *,
    network: Network | None = None,
    largest_batch: Callable[[Config], int] | None = None,
) -> SettledRun:
    """Replace `auto` and whatever the user left open by what fits device, data and checkpoint.

    Args:
        resolved: The settings, with the source of each.
        device: To train on; None: any, as in a plan for another machine.
        ranks: Their number.
        images: Training images of the dataset, before --limit-train and --overfit.
        network: Of the checkpoint of --init, or of the run to resume.
        largest_batch: Measures `--bs auto`, on an open device.

    Raises:
        UsageError: The device does not compute in the chosen precision; `--bs auto` without an open
            device, or one image for batch norm; the warm-up is longer than the run.
    """
    out = run_dir(resolved.config).path
    notices = []
    if device is not None:
        resolved, notice = settle_precision(resolved, device)
        notices += [notice] if notice else []
    if network is not None:
        resolved = _with_network(resolved, network)
    images = trained_images(resolved.config.train, images)
    if resolved.config.train.batch_size == "auto":
        resolved = _with_largest_batch(resolved, images, ranks, largest_batch)
    resolved, rule = adapt_to_data(resolved, images, ranks.world_size)
    plan = make_plan(
        resolved.config.train,
        images,
        ranks.world_size,
        may_shorten_warmup=not resolved.is_chosen("train.warmup"),
    )
    _check_batch_norm(resolved.config, plan.batch_size, ranks)
    return SettledRun(resolved, plan, out, rule, tuple(notices))


def _check_batch_norm(config: Config, batch_size: int, ranks: Ranks) -> None:
    """Check that batch norm of the last map, which is 1 x 1, has several values to average."""
    is_shared = config.train.sync_bn and not ranks.is_single_process
    if config.model.extra_norm == "batch" and batch_size == 1 and not is_shared:
        raise UsageError(
            "--bs 1: batch norm in the extra blocks (--extra-norm batch) needs several images",
            hint="--bs 2, or --extra-norm none",
        )


def check_without_data(resolved: Resolved, device: DeviceFacts) -> tuple[str, ...]:
    """Check what `finalize` would refuse whatever the dataset is; return its notices.

    Raises:
        UsageError: See `finalize`.
    """
    _, notice = settle_precision(resolved, device)
    if resolved.is_chosen("train.warmup"):
        check_warmup(resolved.config.train)
    return (notice,) if notice else ()


def trained_images(config: TrainConfig, images: int) -> int:
    """Return how many of a dataset's images a run trains on."""
    return min(images, config.limit_train or images, config.overfit or images)


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
            f"device {device.name} does not compute in {requested}", hint=f"choose {flags}"
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
    any_size = resolved.with_value("train.batch_size", 1)
    trial, _ = adapt_to_data(any_size, images, ranks.world_size)
    return resolved.with_value("train.batch_size", largest_batch(trial.config))
