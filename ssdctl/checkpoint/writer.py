"""Checkpoints of a run: written atomically, verified before they are trusted, the newest wins.

RUN/checkpoints/step-00001000.pt    what a killed run goes on from
RUN/checkpoints/last.pt             the newest, under a name that stays
RUN/checkpoints/best.pt             the one with the best AP
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ssdctl.checkpoint.reader import FORMAT, Architecture, Checkpoint, read_checkpoint
from ssdctl.data.formats.coco import ClassName
from ssdctl.errors import IntegrityError
from ssdctl.files import atomic_write, link_or_copy, remove_stale_temporaries


class CheckpointDir:
    """`checkpoints/` of a run.

    Args:
        run: The run folder.
        keep: How many of the newest checkpoints stay, besides the best.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.path = run / "checkpoints"
        self._keep = keep

    def write(self, payload: dict[str, Any]) -> None:
        """Write a checkpoint (of `payload`) and drop the oldest.

        Raises:
            DiskError: It cannot be written; the earlier ones are untouched.
        """
        target = self.of_step(payload["step"])
        with atomic_write(target) as file:
            try:
                torch.save(payload, file)
            except RuntimeError as error:  # of PyTorch's writer, which hides the disk's refusal
                raise _disks_own(error) from error
        link_or_copy(target, self.path / "last.pt")
        for old in self.steps()[: -self._keep]:
            old.unlink()

    def of_step(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return self.path / f"step-{step:08d}.pt"

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of a step as the best."""
        link_or_copy(self.of_step(step), self.path / "best.pt")

    def steps(self) -> list[Path]:
        """The checkpoints, the oldest first."""
        return sorted(self.path.glob("step-*.pt"))

    def clean(self) -> None:
        """Remove what a killed save left behind."""
        if self.path.is_dir():
            remove_stale_temporaries(self.path)

    def retire(self, start_step: int) -> list[Path]:
        """Rename what lies after the step that a run goes on from: it was damaged, or left behind.

        Those steps come again, and the newest checkpoint must be of the run that is going on.
        """
        later = [path for path in self.steps() if int(path.stem.partition("-")[2]) > start_step]
        return [path.replace(path.with_name(path.name + ".retired")) for path in later]

    def newest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and a warning for each damaged one before it.

        Raises:
            IntegrityError: There are checkpoints, and none is whole.
        """
        damaged: list[str] = []
        for path in reversed(self.steps()):
            try:
                return read_checkpoint(path), [f"{d}; trying the one before" for d in damaged]
            except IntegrityError as error:
                damaged.append(str(error))
        if damaged:
            raise IntegrityError(
                f"none of the {len(damaged)} checkpoints in {self.path} is whole: {damaged[0]}",
                hint="start anew with another --out, or name a good one with --resume FILE",
            )
        return None, []


def payload(
    *,
    model: nn.Module,
    averaged: Mapping[str, torch.Tensor] | None,
    architecture: Architecture,
    classes: list[ClassName],
    config: dict[str, Any],
    step: int,
    samples_seen: int,
    images: int,
    global_batch: int,
    best_ap: float | None,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """What a checkpoint holds. The tensors are the run's own: copy them before the next step."""
    trained = model.state_dict()
    return {
        "format": FORMAT,
        "model": trained if averaged is None else dict(averaged),  # what to evaluate and deploy
        "trained": None if averaged is None else trained,  # what to go on from, where it differs
        "architecture": architecture._asdict(),  # what to build before loading them
        "classes": msgspec.to_builtins(classes),  # label = place + 1; ids are COCO's
        "config": config,  # every setting, resolved
        "step": step,  # optimizer steps done
        "samples_seen": samples_seen,  # position in the stream of samples
        "images": images,  # images in an epoch
        "global_batch": global_batch,  # samples in a step
        "best_ap": best_ap,  # so far
        "optimizer": optimizer.state_dict(),  # momentum and the like
    }


def _disks_own(error: RuntimeError) -> Exception:
    """The OSError that an error came from, if there is one."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error
