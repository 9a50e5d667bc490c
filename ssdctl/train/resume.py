"""Where a run begins: anew, or where an earlier one stopped. The first rank reads, all follow."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ssdctl.checkpoint.reader import Checkpoint, load_state, read_checkpoint, same_classes
from ssdctl.checkpoint.writer import CheckpointDir
from ssdctl.config.render import values
from ssdctl.config.settings import all_settings, with_current_keys
from ssdctl.data.class_match import class_differences
from ssdctl.data.formats.coco import ClassName
from ssdctl.distributed import collectives
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.runs.lock import LOCK
from ssdctl.train.optimizer import is_adamw, load_optimizer
from ssdctl.train.setup import Say, Setup, load_first_weights


class StartState(NamedTuple):
    """The first step of this process, and what is known before it."""

    step: int
    samples_seen: int
    best_ap: float | None
    is_saved: bool  # whether the run folder holds a checkpoint of it
    averaged: dict[str, Tensor] | None = None  # the average of the weights, where one is kept


def load_or_initialize(
    setup: Setup, folder: CheckpointDir, optimizer: torch.optim.Optimizer, say: Say, warn: Say
) -> StartState:
    """Load the checkpoint to go on from into network and optimizer; without one, first weights.

    Raises:
        UsageError: `--resume never` on a run that has checkpoints; a setting that changes the
            maths differs.
        IntegrityError: The named checkpoint, or every one of the run, is damaged; or it knows
            other classes.
    """
    checkpoint = None
    if setup.ranks.is_main:
        checkpoint = _find(setup, folder, warn)
    checkpoint = collectives.broadcast(checkpoint, setup.ranks)
    if checkpoint is None:
        load_first_weights(setup, say)
        return StartState(0, 0, None, False)
    averaged = restore(setup.model, optimizer, checkpoint, warn)
    step = checkpoint.step
    if checkpoint.global_batch != setup.plan.global_batch_size:
        # The schedule counts in the new batch: the step that has seen as many samples.
        step = checkpoint.samples_seen // setup.plan.global_batch_size
    total = setup.plan.total_steps
    if step < total:
        say(f"going on from {checkpoint.path} (step {step} of {total})")
    else:
        say(f"{checkpoint.path} is at step {step} of {total}: nothing is left to train")
    is_own = checkpoint.path.parent == folder.path and step == checkpoint.step
    return StartState(step, checkpoint.samples_seen, checkpoint.best_ap, is_own, averaged)


def _find(setup: Setup, folder: CheckpointDir, warn: Say) -> Checkpoint | None:
    """The checkpoint to go on from, once it has been found to belong to this run."""
    wanted = setup.config.train.resume
    if wanted == "never":
        # The lock is this process's; the other ranks write their logs there already.
        if any(p.name not in ("logs", LOCK) for p in setup.out.iterdir()):
            raise UsageError(
                f"{setup.out} is not empty, and --resume never would mix a new run into it",
                hint="choose another --out, or leave --resume out to go on with it",
            )
        return None
    if wanted == "auto":
        checkpoint, warnings = folder.newest_intact()
        for warning in warnings:
            warn(warning)
        if checkpoint is None:
            return None
    else:
        checkpoint = read_checkpoint(Path(wanted))
    if checkpoint.peer is not None:
        raise UsageError(
            f"{checkpoint.path} is {checkpoint.peer}'s: it lacks what a resume needs",
            hint=f"--init {checkpoint.path} starts a new run from its weights",
        )
    if changes := _changes(setup, checkpoint):
        if not setup.config.train.resume_changed:
            raise UsageError(
                f"{checkpoint.path} was trained with other settings: {changes}",
                hint="--resume-changed goes on all the same; another --out starts anew",
            )
        warn(f"changed since {checkpoint.path}: {changes}")
    _tell_of_other_data(setup, checkpoint, warn)
    _check_classes(checkpoint, setup.train.classes, warn)
    return checkpoint


def _check_classes(checkpoint: Checkpoint, classes: list[ClassName], warn: Say) -> None:
    """Compare the classes by name; other category ids are no reason to stop.

    Raises:
        IntegrityError: The names differ, or come in another order.
    """
    if not same_classes(checkpoint, classes):
        difference = class_differences(checkpoint.classes, classes)
        raise IntegrityError(
            f"{checkpoint.path} was trained on other classes than the dataset has: "
            f"{difference or 'the same ones come in another order'}",
            hint="--init takes its weights into a new run, those of the classes by name",
        )
    if [c.id for c in checkpoint.classes] != [c.id for c in classes]:
        warn(f"the category ids differ from those of {checkpoint.path}: classes matched by name")


def _tell_of_other_data(setup: Setup, checkpoint: Checkpoint, warn: Say) -> None:
    """Datasets move, so another folder is no refusal; nor should it pass unseen."""
    known, now = checkpoint.config.get("data.root"), setup.config.data.root
    if known and now and known != now:
        warn(f"{checkpoint.path} was trained on {known}, this goes on with {now}")


def _changes(setup: Setup, checkpoint: Checkpoint) -> str:
    """What changes the maths and differs from the checkpoint's run; empty where nothing does."""
    now = values(setup.config)
    before = with_current_keys(checkpoint.config)
    differing = [
        f"{path} was {known!r}, is {now[path]!r}"
        for path, setting in all_settings().items()
        # A setting that the checkpoint's version did not know was what its default stands for.
        if setting.affects_results
        and _plain(known := before.get(path, setting.default)) != _plain(now[path])
    ]
    plan = setup.plan
    if checkpoint.global_batch != plan.global_batch_size:
        differing.append(
            f"the global batch was {checkpoint.global_batch}, is {plan.global_batch_size}"
        )
    if checkpoint.images != plan.images:
        differing.append(f"the dataset had {checkpoint.images} images, has {plan.images}")
    return "; ".join(differing)


def restore(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    warn: Say = lambda _: None,
) -> dict[str, Tensor] | None:
    """Load a checkpoint into network and optimizer; return the average of the weights, if any."""
    trained = checkpoint.model if checkpoint.trained is None else checkpoint.trained
    load_state(model, trained, checkpoint.path)
    _load_optimizer(optimizer, checkpoint, warn)
    return None if checkpoint.trained is None else checkpoint.model


def _load_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, warn: Say) -> None:
    """The state of the checkpoint's optimizer, with this run's settings."""
    kind = "adamw" if is_adamw(optimizer) else "sgd"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    known = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
    if kind != checkpoint.config.get("train.optimizer") or sizes != known:
        warn("the optimizer differs from the checkpoint's: its momentum starts anew")
        return
    load_optimizer(optimizer, checkpoint.optimizer)


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
