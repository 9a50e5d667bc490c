"""Checkpoints of a run: written atomically, verified before they are trusted, the newest wins.

RUN/checkpoints/step-00001000.pt    what a killed run goes on from
RUN/checkpoints/last.pt             the newest, under a name that stays
RUN/checkpoints/best.pt             the one with the best AP
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from ssdctl.data.coco import ClassName
from ssdctl.errors import IntegrityError
from ssdctl.files import atomic_write, link_or_copy, remove_stale_temporaries
from ssdctl.model.ssd300 import SSD300
from ssdctl.model.weights import FORMAT, Architecture, Checkpoint, read_checkpoint


class CheckpointFolder:
    """`checkpoints/` of a run.

    Args:
        run: The run folder.
        keep: How many of the newest checkpoints stay, besides the best.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self.path = run / "checkpoints"
        self._keep = keep

    def save(
        self,
        *,
        model: SSD300,
        architecture: Architecture,
        classes: list[ClassName],
        config: dict[str, Any],
        step: int,
        samples_seen: int,
        images: int,
        global_batch: int,
        best_ap: float | None,
        optimizer: torch.optim.Optimizer,
    ) -> Path:
        """Write the checkpoint of `step` and drop the oldest.

        Raises:
            DiskError: It cannot be written; the earlier ones are untouched.
        """
        payload = {
            "format": FORMAT,
            "model": _contiguous(model.state_dict()),  # plain weights: name -> tensor
            "architecture": architecture._asdict(),  # what to build before loading them
            "classes": msgspec.to_builtins(classes),  # label = place + 1; ids are COCO's
            "config": config,  # every setting, resolved
            "step": step,  # optimizer steps done
            "samples_seen": samples_seen,  # position in the stream of samples
            "images": images,  # images in an epoch
            "global_batch": global_batch,  # samples in a step
            "best_ap": best_ap,  # so far
            "optimizer": _on_host(optimizer.state_dict()),  # momentum and the like
        }
        target = self.path / f"step-{step:08d}.pt"
        with atomic_write(target) as file:
            torch.save(payload, file)
        link_or_copy(target, self.path / "last.pt")
        for old in self.steps()[: -self._keep]:
            old.unlink()
        return target

    def mark_best(self, checkpoint: Path) -> None:
        """Publish a checkpoint as the best."""
        link_or_copy(checkpoint, self.path / "best.pt")

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
        warnings: list[str] = []
        for path in reversed(self.steps()):
            try:
                return read_checkpoint(path), warnings
            except IntegrityError as error:
                warnings.append(f"{error}; trying the one before")
        if warnings:
            raise IntegrityError(
                f"none of the {len(warnings)} checkpoints in {self.path} is whole: {warnings[-1]}",
                hint="start anew with another --out, or name a good one with --resume FILE",
            )
        return None, warnings


def _contiguous(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in plain memory order, so that any reader finds the usual layout."""
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


def _on_host(value: Any) -> Any:
    """Tensors at any depth on the CPU: other devices' do not load everywhere."""
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_on_host(entry) for entry in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value
