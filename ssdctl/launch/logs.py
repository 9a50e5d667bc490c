"""What each rank says: in RUN/logs/rank-N.log, and the first rank's where it always went.

Only rank 0 writes to the terminal; if a rank fails, `ssdctl launch` shows
the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from ssdctl.files import no_follow

SHOWN_LINES = 15
HEADER = "--- rank "


def start_rank_log(path: Path, rank: int) -> None:
    """From now on this process's words go to its log, to the end of the process.

    Where the log cannot be written they stay on the terminal: a log is no reason to fail.
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
        for number in (1, 2):  # the descriptors, so that libraries' words are caught too
            os.dup2(log.fileno(), number)


def last_lines(path: Path, count: int = SHOWN_LINES) -> list[str]:
    """The end of what the last process wrote into a log; nothing where there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
        starts = [n for n, line in enumerate(lines) if line.startswith(HEADER)]
        return lines[starts[-1] + 1 if starts else 0 :][-count:]
    return []


class _Tee:
    """A stream that also writes its lines to a file, except what redraws a terminal."""

    def __init__(self, stream: IO[str], log: IO[str]) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if "\r" not in text and "\033" not in text:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
