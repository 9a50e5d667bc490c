"""Signal handlers of a training that another program started: the Python API."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ssdctl.runtime import signals


@pytest.fixture
def _own_handler() -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None: ...

    before = {number: signal.signal(number, handler) for number in signals.STOP_SIGNALS}
    yield
    for number, earlier in before.items():
        signal.signal(number, earlier)


@pytest.mark.usefixtures("_own_handler")
def test_the_handlers_of_the_program_are_restored() -> None:
    own = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    with signals.handled():
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.stop_requested() == "SIGTERM"
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == own
    assert signals.stop_requested() is None
    with pytest.raises(ZeroDivisionError), signals.handled():
        _ = 1 / 0
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == own


@pytest.mark.usefixtures("_own_handler")
def test_other_threads_do_not_handle_signals() -> None:
    own = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    inside = []

    def work() -> None:
        with signals.handled():
            inside.extend(signal.getsignal(number) for number in signals.STOP_SIGNALS)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == own
