"""The checkpoints of a run: which are kept, which one a resumed run loads.

They are written in a thread: training waits only for a copy of its state. At most one save is in
progress; the next one waits for it.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.file import load_checkpoint, save_checkpoint
from ssdctl.errors import IntegrityError
from ssdctl.files import (
    disk_errors,
    link_or_copy,
    remove_stale_temporaries,
    retry_transient,
)
from ssdctl.runs.layout import RunDir, step_of


class CheckpointFolder:
    """The folder `checkpoints/` of a run.

    Args:
        keep: How many of the newest checkpoints are kept, in addition to the best.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._run = RunDir(run)
        self._keep = keep
        self._continued_from: int | None = None  # until the next checkpoint is written
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save: Future[None] | None = None  # in progress

        self.path = self._run.checkpoints

    def steps(self) -> list[Path]:
        return self._run.step_checkpoints()

    def continue_from(self, step: int) -> list[Path]:
        """Set aside the checkpoints after `step` when the next one is written; return them.

        They are damaged, or of steps that are trained again. Until then a new start can use them.
        """
        self._continued_from = step
        return self._later()

    def save(self, payload: dict[str, Any]) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        self.wait()
        self._save = self._pool.submit(self.write, _on_host(payload))

    def check(self) -> None:
        """Raise the DiskError of the last save, if it failed. Does not wait."""
        if self._save is not None and self._save.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is written; raise DiskError if it could not be."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Finish the save in progress, ignoring its error: for a run that ends by another one."""
        self._pool.shutdown(wait=True)

    def write(self, payload: dict[str, Any]) -> None:
        """Write a checkpoint (see `Trainer.state_dict`) and delete the oldest.

        Raises:
            DiskError: It cannot be written; the earlier ones are unchanged.
        """
        target, later = self._run.step_checkpoint(payload["step"]), self._later()
        if target in later:
            retry_transient(partial(link_or_copy, target, _retired(target)))
            later.remove(target)
        retry_transient(partial(save_checkpoint, target, payload))
        for path in later:
            retry_transient(partial(_retire, path))
        self._continued_from = None
        retry_transient(partial(link_or_copy, target, self._run.last))
        for old in self.steps()[: -self._keep]:
            retry_transient(partial(_delete, old))

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of a step as the best, once it is written."""
        self.wait()
        retry_transient(partial(link_or_copy, self._run.step_checkpoint(step), self._run.best))

    def clean(self) -> None:
        if self.path.is_dir():
            remove_stale_temporaries(self.path)

    def newest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint, and a warning for each damaged one after it.

        Raises:
            IntegrityError: There are checkpoints, and all are damaged.
        """
        damaged: list[str] = []
        later = self._later()
        for path in reversed([path for path in self.steps() if path not in later]):
            try:
                return load_checkpoint(path), [f"{d}; trying the one before" for d in damaged]
            except IntegrityError as error:
                damaged.append(str(error))
        if damaged:
            raise IntegrityError(
                f"all {len(damaged)} checkpoints in {self.path} are damaged: {damaged[0]}",
                hint="start a new run with another --out, or name an intact one: --resume FILE",
            )
        return None, []

    def _later(self) -> list[Path]:
        """Return the checkpoints that the next one replaces."""
        start = self._continued_from
        return [] if start is None else [path for path in self.steps() if step_of(path) > start]


def _on_host(value: Any) -> Any:
    """Return a copy of nested dicts and lists with contiguous tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _on_host(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_host(entry) for entry in value)
    return value


def _retire(path: Path) -> None:
    with disk_errors(path, "renaming"), contextlib.suppress(FileNotFoundError):
        path.replace(_retired(path))


def _delete(path: Path) -> None:
    with disk_errors(path, "deleting"):
        path.unlink(missing_ok=True)


def _retired(path: Path) -> Path:
    return path.with_name(path.name + ".retired")
