"""Find and end the descendants of this process, and only those."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

GRACE_S = 2.0  # between SIGTERM and SIGKILL
GIVE_UP_S = 30.0  # a process in uninterruptible sleep cannot be killed
POLL_S = 0.1
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def end_processes(spared: Collection[int] = ()) -> None:
    """End every descendant of this process: SIGTERM, and SIGKILL `GRACE_S` later."""
    start = time.monotonic()
    signalled: set[int] = set()
    while True:
        _reap(spared)
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        waited = time.monotonic() - start
        if not left or waited > GIVE_UP_S:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if waited > GRACE_S:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in signalled:
                    os.kill(pid, signal.SIGTERM)
                    signalled.add(pid)
        time.sleep(POLL_S / 2)


def _reap(spared: Collection[int]) -> None:
    for pid in children(os.getpid()):
        if pid not in spared:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def descendants(root: int) -> list[int]:
    """Return the descendants of `root`, parents first."""
    parents = _parents()
    tree = [root]
    for pid in tree:  # grows during the iteration
        tree += [child for child, parent in parents.items() if parent == pid]
    return tree[1:]


def children(root: int) -> list[int]:
    """Return the processes that `root` started or adopted."""
    return [pid for pid, parent in _parents().items() if parent == root]


def direct_children(pid: int) -> list[int]:
    """Return the children of a process's main thread with one read, for frequent polling."""
    with contextlib.suppress(OSError):
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def variable_of(pid: int, names: Collection[str]) -> str | None:
    """Return the first of these environment variables that a process was started with."""
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(entry.partition(b"=")[::2] for entry in entries)
        return next((v.decode() for n in names if (v := variables.get(n.encode()))), None)
    return None


def _parents() -> dict[int, int]:
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended in the meantime
            # "PID (NAME) STATE PPID ...": the name may contain blanks and parentheses
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return parents


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, instead of init (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
