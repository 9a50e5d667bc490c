"""The checkpoints of a run: which are kept, which one a resumed run loads.

They are written in a thread: training waits only for a copy of its state. At most one save is in
progress; the next one waits for it. `update` derives links and deletions from the checkpoints and
the step of the best evaluation, so a process that is killed between them loses nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ssdctl.checkpoint.file import load_resumable, save_checkpoint
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import (
    disk_errors,
    link_or_copy,
    remove_stale_temporaries,
    retry_transient,
    sync_file,
)
from ssdctl.runs.folder import UPLOAD_PREFIX, RunDir, evaluation_of, step_of
from ssdctl.runs.going_back import (
    finish_going_back,
    go_back,
    read_resumed_from,
    retire,
    retired,
    retired_files,
)


class CheckpointFolder:
    """The folder `checkpoints/` of a run.

    Args:
        keep: How many of the newest checkpoints are kept, in addition to the best. Those set
            aside count as the oldest.

    Attributes:
        best_step: The step of the best evaluation; None if not known.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._run = RunDir(run)
        self._keep = keep
        self.best_step: int | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save: Future[None] | None = None  # in progress

        self.path = self._run.checkpoints

    def steps(self) -> list[Path]:
        return self._run.step_checkpoints()

    def save(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        self.wait()
        self._save = self._pool.submit(self.write, _on_host(checkpoint))

    def start_to_add(self, step: int, thresholds: list[float | None]) -> None:
        """Start to write a checkpoint again, with the thresholds of its own evaluation.

        The score arrives after the checkpoint is saved. It may be damaged, or gone, meanwhile.
        """

        def add() -> None:
            with contextlib.suppress(IntegrityError, UsageError):
                saved = load_resumable(self._run.step_checkpoint(step))
                self.write(replace(saved, thresholds=thresholds))

        self.wait()
        self._save = self._pool.submit(add)

    def check(self) -> bool:
        """Return whether no save is in progress; raise the DiskError of the last one."""
        if self._save is not None and self._save.done():
            self.wait()
        return self._save is None

    def wait(self) -> None:
        """Wait until the save in progress is written; raise DiskError if it could not be."""
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Finish the save in progress, ignoring its error: for a run that ends by another one."""
        self._pool.shutdown(wait=True)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and delete the oldest.

        The records before it are on disk before it is.
        """
        target = self._run.step_checkpoint(checkpoint.step)
        retry_transient(partial(sync_file, self._run.metrics))
        retry_transient(partial(save_checkpoint, target, checkpoint))
        self.update()

    def update(self) -> None:
        """Derive the links and deletions from the checkpoints and the step of the best evaluation.

        Every start and every save calls it, and it changes nothing that is up to date.

        Raises:
            DiskError: A file cannot be written; the next call continues.
        """
        run, steps = self._run, self.steps()
        links = [(steps[-1], run.last)] if steps else []
        if self.best_step is not None:
            best = run.step_checkpoint(self.best_step)
            links += [(best, run.best), (evaluation_of(best), run.evaluation)]
        for source, target in links:
            if source.is_file() and not (target.is_file() and is_same_file(source, target)):
                retry_transient(partial(link_or_copy, source, target))
        for old in [*retired_files(run), *steps][: -self._keep]:
            retry_transient(partial(_delete, evaluation_of(old)))
            retry_transient(partial(_delete, old))
        if self.path.is_dir() and not retired_files(run):
            for old in (run.metrics, run.evaluation):
                retry_transient(partial(_delete, retired(old)))

    def is_own(self, path: Path) -> bool:
        return path.resolve().parent == self.path.resolve()

    def begin(self, checkpoint: Checkpoint) -> None:
        """Prepare the folder for steps after a checkpoint, of this run or another one."""
        if self.is_own(checkpoint.path):
            step = self._run.step_checkpoint(checkpoint.step)
            if not step.exists():  # it is best.pt or last.pt, which others may replace
                retry_transient(partial(link_or_copy, checkpoint.path, step))
        elif not self.steps():  # the records are of a run that was killed before it saved
            retry_transient(partial(retire, self._run.metrics))

    def go_back(self, step: int, file: Path | None) -> list[Path]:
        """Set aside the checkpoints after `step` and the records of their steps; return them.

        They are damaged, or of a branch that the run leaves.

        Args:
            file: The checkpoint of `--resume FILE` that the run continues from.
        """
        is_later = bool(self.steps()) and step_of(self.steps()[-1]) > step
        is_best_later = is_later and (self.step_of_best() or 0) > step
        return go_back(self._run, step, file, is_best_later=is_best_later)

    def step_of_best(self) -> int | None:
        """Return the step of best.pt; None if there is none, or it is damaged."""
        if (best := self._run.best).is_file():
            for path in self.steps():
                if is_same_file(path, best):
                    return step_of(path)
            with contextlib.suppress(IntegrityError):
                return load_resumable(best).step
        return None

    def repair(self) -> None:
        """Finish what a killed process began. Call it with the run's lock, before reading.

        If there is no step-N.pt, best.pt and last.pt are linked to such names.
        """
        if self.path.is_dir():
            remove_stale_temporaries(self.path)
            for upload in self.path.glob(f"{UPLOAD_PREFIX}*"):
                shutil.rmtree(upload, ignore_errors=True)
        finish_going_back(self._run)
        for path in self._run.resumable() if not self.steps() else ():
            with contextlib.suppress(IntegrityError):
                target = self._run.step_checkpoint(load_resumable(path).step)
                retry_transient(partial(link_or_copy, path, target))

    def newest_intact(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest intact checkpoint, and a warning for each damaged one after it.

        It is last.pt or best.pt if the run has no step-N.pt.

        Raises:
            IntegrityError: There are checkpoints, and all are damaged.
        """
        damaged: list[str] = []
        aside = read_resumed_from(self._run).aside  # not renamed yet
        for path in reversed([p for p in self._run.resumable() if p.name not in aside]):
            try:
                return load_resumable(path), [f"{d}; trying the one before" for d in damaged]
            except IntegrityError as error:
                damaged.append(str(error))
        if damaged:
            raise IntegrityError(
                f"all {len(damaged)} checkpoints in {self.path} are damaged: {damaged[0]}",
                hint="start a new run with another --out, or name an intact one: --resume FILE",
            )
        return None, []


def _on_host(checkpoint: Checkpoint) -> Checkpoint:
    names = ("model", "trained", "optimizer", "rank_statistics")
    return replace(checkpoint, **{name: _copied(getattr(checkpoint, name)) for name in names})


def _copied(value: Any) -> Any:
    """Return a copy of nested dicts and lists with contiguous tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(entry) for entry in value)
    return value


def _delete(path: Path) -> None:
    with disk_errors(path, "deleting"):
        path.unlink(missing_ok=True)


def is_same_file(source: Path, target: Path) -> bool:
    """Return whether a name is a link to a file, or a copy where a file system has no links."""
    one, other = source.stat(), target.stat()
    if one.st_nlink > 1 or other.st_nlink > 1:
        return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
    return (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)
