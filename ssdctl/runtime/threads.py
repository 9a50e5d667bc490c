"""Run a function in a daemon thread; start work some items ahead of its use."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


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


def map_ahead(
    pool: Executor, function: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Yield `function(item)` for each item in order; up to `ahead` more calls are under way.

    If a call fails, its exception is raised when its result is yielded. Items are taken only as far
    as needed, so they may be endless.
    """
    futures = (pool.submit(function, item) for item in items)
    return (future.result() for future in take_ahead(futures, ahead))


def take_ahead(items: Iterable[T], ahead: int) -> Iterator[T]:
    """Yield items in order; `ahead` more items are taken before each is yielded."""
    taken: deque[T] = deque()
    for item in items:
        taken.append(item)
        if len(taken) > ahead:
            yield taken.popleft()
    yield from taken
