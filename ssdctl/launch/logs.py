"""Write the output of each rank to RUN/logs/rank-N.log, and that of rank 0 to the terminal too.

If a rank fails, `ssdctl launch` prints the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from ssdctl.files import no_follow

MAX_LINES = 15
HEADER = "--- rank "


def start_rank_log(path: Path, rank: int) -> None:
    """Redirect the output of this process to its log until it ends.

    If the log cannot be written, the output stays on the terminal.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        log = open(  # noqa: SIM115 - until the process ends
            path, "a", 1, encoding="utf-8", errors="replace", opener=no_follow
        )
        log.write(f"{HEADER}{rank}, process {os.getpid()}, {time.strftime('%F %T')}\n")
        if rank == 0:
            sys.stderr = _Tee(sys.stderr, log)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):  # the descriptors, to include the output of libraries
            os.dup2(log.fileno(), number)


def last_lines(path: Path, count: int = MAX_LINES) -> list[str]:
    """Return the last lines of the last process in a log; an empty list if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(HEADER)]
        return lines[starts[-1] + 1 if starts else 0 :][-count:]
    return []


class _Tee:
    """A stream that also writes its text to a file, except text that redraws a terminal."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if "\r" not in text and "\033" not in text:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
