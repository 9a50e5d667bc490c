"""What a rank leaves for `ssdctl launch`: its process id, its exit code, and its log.

torchrun exits with 1 if any rank fails, and mpirun and srun return the code of one rank. So each
rank records its code in a folder that the launch created and named in the environment. The
kernel kills a rank of a local launch together with the launcher that started it.

Each rank writes its output to RUN/logs/rank-N.log, rank 0 also to the terminal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ssdctl.distributed import RANK_NUMBERS
from ssdctl.errors import ExitCode
from ssdctl.files import no_follow

# The folder, set by `ssdctl launch`. The name does not begin with SSDCTL_, as settings do.
EXITS_VARIABLE = "_SSDCTL_RANK_EXITS"
LAUNCHER_VARIABLE = "_SSDCTL_LOCAL_LAUNCHER"  # the file with the launcher's process id
# Codes that come from ssdctl, never from a launcher itself.
PASSED_ON = frozenset(ExitCode) - {ExitCode.OK, ExitCode.BUG}
HEADER = "--- rank "
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextlib.contextmanager
def recorded_exit() -> Iterator[Callable[[int], None]]:
    """Record this process's exit code for `ssdctl launch`, if that started it.

    Yields:
        A function that records a code and ends the process at once, without cleaning up.
    """
    # Removed from the environment, so that subprocesses do not record their exits.
    folder, launcher = os.environ.pop(EXITS_VARIABLE, ""), os.environ.pop(LAUNCHER_VARIABLE, "")
    rank = next((os.environ[name] for name in RANK_NUMBERS if name in os.environ), "")
    target = Path(folder, rank) if folder and rank.isdigit() else None
    if target is not None and launcher:
        die_with_parent()
        if _has_ended(Path(launcher)):
            os._exit(ExitCode.DISTRIBUTED)
        _write(target.with_suffix(".pid"), str(os.getpid()))

    def record(code: int) -> bool:
        # File times are too coarse to tell which of two ranks was the first.
        return target is not None and _write(target, f"{code} {time.time_ns()}")

    def exit_now(code: int) -> None:
        os._exit(0 if record(code) else code)

    try:
        yield exit_now
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if record(code) and code == ExitCode.STOPPED:
            # A launcher treats every code but 0 as a failure: it would end the ranks that have not
            # finished, and print a traceback. The launch reads the recorded code.
            raise SystemExit(0) from None
        raise
    except BaseException:
        record(1)
        raise
    else:
        record(0)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        import ctypes  # late: every command imports this file

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _has_ended(launcher: Path) -> bool:
    """Return whether the launcher ended before `die_with_parent` took effect."""
    try:
        status = Path(f"/proc/{int(launcher.read_text())}/stat").read_text()
    except (OSError, ValueError):
        return sys.platform == "linux"
    return status.rpartition(")")[2].split()[0] in "ZX"


def _write(path: Path, text: str) -> bool:
    with contextlib.suppress(OSError):  # the launch is gone, or on another node
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", opener=no_follow) as file:
            file.write(text)
        temporary.replace(path)
        return True
    return False


def read_exits(folder: Path) -> dict[int, int]:
    """Return the recorded exit codes by rank, in the order in which the ranks ended."""
    with contextlib.suppress(OSError):
        files = [path for path in folder.iterdir() if path.name.isdigit()]
        ends = [(*map(int, reversed(path.read_text().split())), int(path.name)) for path in files]
        return {rank: code for _, code, rank in sorted(ends)}
    return {}


def read_processes(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have begun, by rank."""
    with contextlib.suppress(OSError):
        return {int(p.stem): int(p.read_text()) for p in folder.glob("[0-9]*.pid")}
    return {}


def start_rank_log(path: Path, rank: int) -> None:
    """Redirect this process's output to its log; if that cannot be written, it stays as it is."""
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


def last_lines(path: Path, count: int = 15) -> list[str]:
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
