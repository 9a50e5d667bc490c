"""Results are in order; calls are started up to the given number ahead."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ssdctl.runtime.threads import map_ahead, take_ahead


def test_results_are_in_order_whatever_finishes_first() -> None:
    second_done = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert second_done.wait(10)
        if item == 1:
            second_done.set()
        return item * item

    with ThreadPoolExecutor(2) as pool:
        assert list(map_ahead(pool, work, range(5), 2)) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_items_are_read_ahead_up_to_the_limit(ahead: int) -> None:
    taken = []
    items = (taken.append(item) or item for item in itertools.count())  # type: ignore[func-returns-value]
    results = take_ahead(items, ahead)
    assert next(results) == 0
    assert len(taken) == ahead + 1
    assert next(results) == 1
    assert len(taken) == ahead + 2
    assert list(take_ahead(range(2), ahead)) == [0, 1]


def test_an_error_is_raised_in_its_place() -> None:
    with ThreadPoolExecutor(2) as pool:
        results = map_ahead(pool, lambda item: 1 // item, (1, 0, 1), 2)
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
