"""Run a function in a daemon thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def run_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread and return its future.

    The thread does not block interpreter exit, even if it hangs (a dead file system).
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
