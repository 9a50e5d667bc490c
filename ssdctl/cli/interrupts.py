"""Handle SIGINT and SIGTERM in commands that continue when they are run again."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from ssdctl.errors import Stopped


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """End the block with exit code 75 on Ctrl-C and SIGTERM.

    Args:
        kept: What remains of the block's work, for the message.

    Raises:
        Stopped: A signal was received.
    """

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {kept}", hint="run the same command again to continue") from None
    finally:
        signal.signal(signal.SIGTERM, before)
