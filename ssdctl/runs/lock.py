"""Hold an exclusive lock on the run directory, so that a second process cannot train in it.

The first rank locks `RUN/.lock`, which contains its process id and host. The kernel releases a
lock when the process ends, so a dead run never blocks a new one. On a file system without locks
nothing is checked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from ssdctl.errors import UsageError
from ssdctl.files import make_dir, try_lock
from ssdctl.runs.layout import RunDir

WAIT_S = 10.0  # the processes of a killed launch take some seconds to end
POLL_S = 0.2
MAX_OWNER = 300  # characters of process id and host name

log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusive_run(out: Path) -> Iterator[None]:
    """Create the run directory and hold an exclusive lock on it; wait up to WAIT_S for its owner.

    An owner on another machine causes only a warning: some network file systems keep the locks of
    a node that is gone, and its run must be able to continue elsewhere.

    Raises:
        UsageError: Another process of this machine trains in it.
        DiskError: The folder cannot be created.
    """
    is_new = not out.is_dir()
    path = RunDir(make_dir(out)).lock
    descriptor = _wait_for_lock(path)
    if descriptor is None:
        process, _, host = _owner(path).partition(" on ")
        if host == socket.gethostname():
            raise UsageError(
                f"{out}: another ssdctl process trains in this folder (process {process})",
                hint="wait for it or stop it; use a different --out to run both",
            )
        log.warning(
            "%s: process %s on %s seems to train in this folder too; if it is still running, stop "
            "one of them",
            out,
            process or "?",
            host or "another machine",
        )
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a full disk is reported by the first save
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with contextlib.suppress(OSError):  # the file system may be gone: raise why the run ended
            path.unlink()
        os.close(descriptor)
        if is_new:
            with contextlib.suppress(OSError):
                out.rmdir()  # empty if the run was refused


def _wait_for_lock(path: Path) -> int | None:
    """Return the locked file's descriptor, or None if another process keeps the lock."""
    deadline = time.monotonic() + WAIT_S
    descriptor = try_lock(path)
    if descriptor is None:
        notice = "another ssdctl process trains in %s: waiting %.0f s for its end"
        log.info(notice, path.parent, WAIT_S)
    while descriptor is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        make_dir(path.parent)  # an owner whose run was refused removes the empty folder
        descriptor = try_lock(path)
    return descriptor


def _owner(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(MAX_OWNER)
    except OSError:
        return ""


def running_on(out: Path) -> str | None:
    """Return the name of the machine where a process trains in a folder; None if none does.

    If that is another machine, its process may have ended without removing the lock.
    """
    process, _, host = _owner(RunDir(out).lock).partition(" on ")
    if not process.isdecimal():
        return None
    if host == socket.gethostname():
        try:
            os.kill(int(process), 0)  # only tests whether it exists
        except PermissionError:  # another user's
            pass
        except (OSError, OverflowError):
            return None
    return host
