"""How a command that can go on later ends by a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from ssdctl.errors import Stopped


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block with 75; `kept` says what the next start has of it.

    Raises:
        Stopped: A signal came.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {kept}", hint="run the same command again to go on") from None
    finally:
        signal.signal(signal.SIGTERM, before)
