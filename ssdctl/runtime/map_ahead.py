"""Start work some items ahead of its use, and return the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(
    pool: Executor, function: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Yield `function(item)` for each item in order, computed by the pool.

    Args:
        pool: Runs the calls.
        function: Its exceptions are raised when its result is due.
        items: Taken only as far as needed, so they may be endless.
        ahead: How many calls are started before the result that is waited for.
    """
    futures = (pool.submit(function, item) for item in items)
    return (future.result() for future in take_ahead(futures, ahead))


def take_ahead(items: Iterable[T], ahead: int) -> Iterator[T]:
    """Yield items in order, each after the `ahead` items that follow it were taken."""
    taken: deque[T] = deque()
    for item in items:
        taken.append(item)
        if len(taken) > ahead:
            yield taken.popleft()
    yield from taken
