"""Save beside training: the run waits for a copy of its state, a thread does the writing.

At most one save is under way; the next waits for it. What went wrong in the thread is raised at the
next step, by `check`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from ssdctl.checkpoint.writer import CheckpointDir


class AsyncCheckpointWriter:
    """Writes the checkpoints of a run.

    Args:
        folder: Where to.
    """

    def __init__(self, folder: CheckpointDir) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._under_way: Future[None] | None = None

    def save(self, payload: dict[str, Any]) -> None:
        """Have a checkpoint written; its tensors are copied before this returns."""
        self.wait()
        copied = copy_to_host(payload)
        self._start(lambda: self._folder.write(copied))

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of `step` as the best, once it is written."""
        self.wait()
        self._folder.mark_best(step)

    def check(self) -> None:
        """Raise what the last save failed of, if it did; never waits."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            DiskError: It could not be.
        """
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Let the save that is under way end; for a run that ends by an error of its own."""
        self._pool.shutdown(wait=True)

    def _start(self, work: Callable[[], None]) -> None:
        self._under_way = self._pool.submit(work)


def copy_to_host(value: Any) -> Any:
    """A copy of nested dicts and lists whose tensors lie on the host, in plain memory order."""
    if isinstance(value, torch.Tensor):
        copied = value.detach().to("cpu", copy=True)
        return copied.contiguous()
    if isinstance(value, dict):
        return {key: copy_to_host(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_to_host(entry) for entry in value)
    return value
