"""Write checkpoints in a thread: training waits only for a copy of its state.

At most one save is in progress; the next one waits for it. An error of the thread is raised by
`check`, at the next step.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class CheckpointStore(Protocol):
    """Where checkpoints are written."""

    def write(self, payload: dict[str, Any]) -> None: ...

    def mark_best(self, step: int) -> None: ...


class AsyncCheckpointWriter:
    """Writes the checkpoints of a run in a thread.

    Args:
        store: Writes them to the disk.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save: Future[None] | None = None  # in progress

    def save(self, payload: dict[str, Any]) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        self.wait()
        copied = copy_to_host(payload)
        self._save = self._pool.submit(self._store.write, copied)

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of `step` as the best once it is written."""
        self.wait()
        self._store.mark_best(step)

    def check(self) -> None:
        """Raise the error of the last save, if it failed. Does not wait."""
        if self._save is not None and self._save.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in progress is written.

        Raises:
            DiskError: It could not be written.
        """
        save, self._save = self._save, None
        if save is not None:
            save.result()

    def close(self) -> None:
        """Finish the save in progress, ignoring its error: for a run that ends by another one."""
        self._pool.shutdown(wait=True)


def copy_to_host(value: Any) -> Any:
    """Return a copy of nested dicts and lists with contiguous tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        copied = value.detach().to("cpu", copy=True)
        return copied.contiguous()
    if isinstance(value, dict):
        return {key: copy_to_host(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(entry) for entry in value)
    return value
