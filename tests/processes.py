"""Wait for conditions, and check whether a process is running."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def wait_for(condition: Callable[[], Any], timeout_s: float = 90) -> Any:
    """Return the condition's value as soon as it is true."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout_s} s")


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
