"""Signals ask; the loop answers at a step's end, once all ranks agree. Torch-free.

    signals.install()        # first thing, before torch is imported
    signals.stop_requested()

SIGTERM, SIGINT and SIGUSR1 (Slurm's warning) ask the run to save and stop with exit 75. A second
SIGINT interrupts at once: exit 130.
"""

from __future__ import annotations

import signal
from types import FrameType

ASKS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_received: list[int] = []


def install() -> None:
    """Put the handlers in place (main thread only); what came already is kept."""
    for number in ASKS_TO_STOP:
        signal.signal(number, _handle)


def restore() -> None:
    """Give the signals their default meaning back."""
    _received.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)


def stop_requested() -> str | None:
    """The name of the first signal that came, or None."""
    return signal.Signals(_received[0]).name if _received else None


def _handle(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    if _received.count(signal.SIGINT) > 1:
        raise KeyboardInterrupt
