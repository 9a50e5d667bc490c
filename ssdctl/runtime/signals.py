"""Signals set a flag; the training loop acts on it between steps, when all ranks agree.

SIGTERM, SIGINT, SIGUSR1 (Slurm's warning) and SIGHUP (a lost terminal) request a save and a stop
with exit 75; under nohup SIGHUP stays ignored. A second SIGINT interrupts at once: exit 130. Before
the first step there is nothing to save, so the run ends immediately. `install` comes first, before
torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TypeVar

from ssdctl.errors import Stopped

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# End commands that do not train as Ctrl-C does, with another code; mpirun passes only SIGUSR1 on.
ENDING = ("SIGTERM", "SIGHUP", "SIGUSR1")
T = TypeVar("T")

_received: list[int] = []
_blocks: set[object] = set()  # of `handled` that are entered
_earlier: dict[int, Any] = {}  # handlers that the last of them restores
_ends_at_once = False  # whether a signal ends the run immediately
_exit_early: Callable[[], object] | None = None  # ends the process during the imports


def exit_during_imports(exit_early: Callable[[], object]) -> None:
    """Call a function that ends the process at the first signal, until `ending_at_once` is entered.

    An exception would not end it: imported packages may catch it.
    """
    global _exit_early
    _exit_early = exit_early
    if _received:
        _write_and_exit(exit_early)


def install() -> None:
    """Install the handlers (main thread only); signals received earlier are kept."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)


def restore() -> None:
    """Restore the default handlers, and forget the signals received."""
    global _exit_early
    _received.clear()
    _exit_early = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in STOP_SIGNALS:
        if number != signal.SIGINT and signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def interrupt_on_end() -> None:
    """Raise KeyboardInterrupt with the signal's name at one of `ENDING`: temporary files go."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    for name in ENDING:
        if signal.getsignal(number := signal.Signals[name]) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Handle the signals in the block; the last block restores the earlier handlers.

    Blocks may overlap, as those of two trainers that are stepped in turn. Nothing changes where
    the handlers are installed already. Only the main thread can install handlers; in other threads
    the block runs without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _restore_earlier()
    if not _blocks and signal.getsignal(signal.SIGTERM) is not _handle:
        _earlier.update({number: signal.getsignal(number) for number in STOP_SIGNALS})
        install()
    block = object()
    _blocks.add(block)
    try:
        yield
    finally:
        _blocks.discard(block)
        if threading.current_thread() is threading.main_thread():
            _restore_earlier()  # else the next signal does


def _restore_earlier() -> None:
    if not _blocks and _earlier:
        restore()
        for number, handler in _earlier.items():
            if handler is not None:  # None: not installed by Python
                signal.signal(number, handler)
        _earlier.clear()


@contextlib.contextmanager
def announced(show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` with one line as soon as the first signal of the block arrives, in a thread.

    The handlers run in the main thread after its current operation, which may take seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        for (number,) in iter(lambda: os.read(reader, 1), b""):
            if number in STOP_SIGNALS:
                again = " (Ctrl-C again to quit without saving)" if number == signal.SIGINT else ""
                name = "" if again else f"{signal.Signals(number).name}: "
                show(f"{name}stopping after this step...{again}")
                break

    earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(writer)  # ends the thread
        thread.join()
        os.close(reader)


def stop_requested() -> str | None:
    """Return the name of the first signal received, or None."""
    return signal.Signals(_received[0]).name if _received else None


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Raise Stopped immediately at a signal before or within the block: nothing is trained yet.

    In a thread only at one before: the main thread, which gets signals, may be in a step.
    """
    global _ends_at_once, _exit_early
    _exit_early = None
    gets_signals = threading.current_thread() is threading.main_thread()
    _ends_at_once |= gets_signals
    try:
        if _received:
            raise _stopped_before_the_first_step()
        yield
    finally:
        _ends_at_once &= not gets_signals


def until_stopped(items: Iterable[T], **_: Any) -> Iterator[T]:
    """Yield the items until a signal requests a stop."""
    for item in items:
        if _received:
            return
        yield item


def _handle(number: int, frame: FrameType | None) -> None:
    if _earlier and not _blocks:  # the last block ended in another thread
        _restore_earlier()
        signal.raise_signal(number)
        return
    _received.append(number)
    if _received.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
    if _exit_early is not None:
        _write_and_exit(_exit_early)
    if _ends_at_once and len(_received) == 1:
        raise _stopped_before_the_first_step()


def _write_and_exit(exit_early: Callable[[], object]) -> None:
    message, hint = _stopped_before_the_first_step().for_command_line()
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\nhint: {hint}\n".encode())
    exit_early()


def _stopped_before_the_first_step() -> Stopped:
    return Stopped(
        f"stopped by {stop_requested()} before the first step of this start; "
        "earlier checkpoints are unchanged",
        hint="run the same command again to continue",
    )
