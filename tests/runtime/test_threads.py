"""Signal handlers of a training that another program started, and work that threads do ahead."""

import hashlib
import os
import signal
import threading
import time
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
@pytest.mark.parametrize("next_is", ["a signal", "a block"])
def test_a_block_that_another_thread_ends(next_is: str) -> None:
    """As of a trainer: the handlers are restored when they are needed."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
    own = [signal.getsignal(number) for number in signals.STOP_SIGNALS]
    block = signals.handled()
    block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    if next_is == "a signal":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        with signals.handled():
            assert signals.stop_requested() is None
    assert [signal.getsignal(number) for number in signals.STOP_SIGNALS] == own
    assert told == [signal.SIGTERM] * (next_is == "a signal")


@pytest.mark.usefixtures("_own_handler")
def test_a_signal_is_announced_before_the_main_thread_can_act() -> None:
    """As in a step: one call of a library, during which no handler in Python runs."""
    answers: list[tuple[float, str]] = []

    def show(text: str) -> None:
        answers.append((time.monotonic(), text))

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before, sent = threading.active_count(), list[float]()
    with signals.handled(), signals.announced(show):
        timer = threading.Timer(0.05, interrupt)
        timer.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        computed = time.monotonic()
        assert signals.stop_requested() == "SIGINT"
        timer.join()
    assert [sent[0] <= answered < computed for answered, _ in answers] == [True]
    assert "Ctrl-C" in answers[0][1]
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == before


def test_without_a_signal_nothing_is_announced() -> None:
    answers: list[str] = []
    with signals.announced(answers.append):
        pass
    thread = threading.Thread(target=lambda: signals.announced(answers.append).__enter__())
    thread.start()
    thread.join()
    assert answers == []
