"""Where a run begins: anew, or where an earlier one stopped."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from ssdctl.config.render import values
from ssdctl.config.settings import all_settings
from ssdctl.errors import UsageError
from ssdctl.model.weights import Checkpoint, load_state, read_checkpoint, same_classes
from ssdctl.train.checkpoint import CheckpointFolder
from ssdctl.train.setup import Say, Setup


class Start(NamedTuple):
    """The first step of this process, and what is known before it."""

    step: int
    samples_seen: int
    best_ap: float | None
    is_saved: bool  # whether the run folder holds a checkpoint of it


def find_start(
    setup: Setup, folder: CheckpointFolder, optimizer: torch.optim.Optimizer, say: Say
) -> Start:
    """Load the checkpoint to go on from into the network and the optimizer, if there is one.

    Raises:
        UsageError: `--resume never` on a run that has checkpoints; a setting that changes the
            maths differs.
        IntegrityError: The named checkpoint is damaged.
    """
    wanted = setup.config.train.resume
    if wanted == "never":
        if folder.steps():
            raise UsageError(
                f"{setup.out} holds a run, and --resume never would mix another one into it",
                hint="choose another --out, or leave --resume out to go on with it",
            )
        return Start(0, 0, None, False)
    checkpoint, warnings = (
        folder.newest_intact() if wanted == "auto" else (read_checkpoint(Path(wanted)), [])
    )
    for warning in warnings:
        say(f"warning: {warning}")
    if checkpoint is None:
        return Start(0, 0, None, False)
    if checkpoint.peer is not None:
        raise UsageError(
            f"{checkpoint.path} is {checkpoint.peer}'s: it lacks what a resume needs",
            hint=f"--init {checkpoint.path} starts a new run from its weights",
        )
    if not setup.config.train.resume_changed:
        _refuse_changes(setup, checkpoint)
    _refuse_other_classes(setup, checkpoint)
    load_state(setup.model, checkpoint.model, checkpoint.path)
    optimizer.load_state_dict(checkpoint.optimizer)
    say(f"going on from {checkpoint.path} (step {checkpoint.step} of {setup.plan.total_steps})")
    is_own = checkpoint.path.parent == folder.path
    return Start(checkpoint.step, checkpoint.samples_seen, checkpoint.best_ap, is_own)


def _refuse_changes(setup: Setup, checkpoint: Checkpoint) -> None:
    now = values(setup.config)
    differing = [
        f"{path} was {checkpoint.config.get(path)!r}, is {now[path]!r}"
        for path, setting in all_settings().items()
        if setting.maths and _plain(checkpoint.config.get(path)) != _plain(now[path])
    ]
    if checkpoint.images != setup.plan.images:
        differing.append(f"the dataset had {checkpoint.images} images, has {setup.plan.images}")
    if differing:
        raise UsageError(
            f"{checkpoint.path} was trained with other settings: {'; '.join(differing)}",
            hint="--resume-changed goes on all the same; another --out starts anew",
        )


def _refuse_other_classes(setup: Setup, checkpoint: Checkpoint) -> None:
    if not same_classes(checkpoint, setup.train.classes):
        raise UsageError(
            f"{checkpoint.path} knows {checkpoint.architecture.num_classes - 1} classes, "
            f"the dataset has {len(setup.train.classes)}, or their names differ",
            hint="--init takes its weights into a new run",
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
