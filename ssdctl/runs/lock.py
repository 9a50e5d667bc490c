"""One run folder, one run: a second process that would train in it is refused. Torch-free.

The first rank locks `RUN/.lock`, which names it. The kernel drops a lock with the process that held
it, so a dead run is never in the way; and where a file system knows no locks, nothing is checked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ssdctl.errors import UsageError
from ssdctl.files import disk_errors, make_dir

LOCK = ".lock"
PATIENCE_S = 10.0  # the processes of a launch that was killed take some seconds to end
TICK_S = 0.2


@contextlib.contextmanager
def exclusive_run(
    out: Path, say: Callable[[str], None], warn: Callable[[str], None]
) -> Iterator[None]:
    """Be the only one that trains in `out`, which is created; wait a little for one that ends.

    A holder on another machine is warned of and no more: some network file systems remember the
    locks of a node that is gone, and its run must go on elsewhere.

    Raises:
        UsageError: Another process of this machine trains there.
        DiskError: The folder cannot be created.
    """
    is_new = not out.is_dir()
    path = make_dir(out) / LOCK
    descriptor = _patiently(path, say)
    if descriptor is None:
        process, _, host = _holder(path).partition(" on ")
        if host == socket.gethostname():
            raise UsageError(
                f"{out}: another ssdctl trains there (process {process})",
                hint="wait for it or stop it; a run beside it wants another --out",
            )
        warn(
            f"{out}: process {process or '?'} on {host or 'another machine'} seems to train there "
            "too; where it still lives, stop one of the two"
        )
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a full disk is for the first save to tell
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):
                out.rmdir()  # empty where the run was refused


def _patiently(path: Path, say: Callable[[str], None]) -> int | None:
    """The lock, or None where it stays another's."""
    end = None
    while True:
        descriptor, is_ours = _attempt(path)
        if is_ours:
            return descriptor
        os.close(descriptor)
        if end is None:
            end = time.monotonic() + PATIENCE_S
            say(f"another ssdctl trains in {path.parent}: waiting {PATIENCE_S:.0f} s for its end")
        elif time.monotonic() > end:
            return None
        time.sleep(TICK_S)


def _attempt(path: Path) -> tuple[int, bool]:
    """The lock file, open, and whether we hold its lock."""
    with disk_errors(path, "locking"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return descriptor, False
    except OSError:
        return descriptor, True  # no locks on this file system
    try:  # whoever held it removes it at the end
        return descriptor, path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return descriptor, False


def _holder(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
