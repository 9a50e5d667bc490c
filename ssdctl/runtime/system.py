"""What Linux has and other systems may not: CPU affinity, file locks, resource limits. Torch-free.

Only Linux is tested; on other systems the functions return that the answer is unknown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]
try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

UNLIMITED = -1  # a limit that is not set
RESERVED_FILES = 512  # for everything but the store


def usable_cpus() -> Collection[int]:
    """Return the numbers of the CPUs that this process may use; all, if it cannot be restricted."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def lock_exclusively(descriptor: int) -> None:
    """Lock an open file without waiting; the lock ends when it is closed.

    Raises:
        BlockingIOError: Another process has it.
        OSError: The system or the file system has no locks.
    """
    if fcntl is None:
        raise OSError("this system has no file locks")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def device_control(descriptor: int, request: int, argument: bytes) -> bytes:
    """Call ioctl(2).

    Raises:
        OSError: It fails, or the system does not have it.
    """
    if fcntl is None:
        raise OSError("this system has no ioctl")
    return fcntl.ioctl(descriptor, request, argument)


def resource_limit(name: str) -> tuple[int, int] | None:
    """Return the soft and the hard limit of a resource, or `UNLIMITED`; None if it is unknown.

    Args:
        name: As in the names of the module `resource`: `NOFILE`, `MEMLOCK`, `AS`.
    """
    number = getattr(resource, f"RLIMIT_{name}", None)
    if number is None:
        return None
    soft, hard = (
        UNLIMITED if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(number)
    )
    return soft, hard


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, if `count` more need it."""
    limits = resource_limit("NOFILE")
    needed = count + RESERVED_FILES
    if limits is None or limits[0] == UNLIMITED or limits[0] >= needed:
        return
    hard = limits[1]
    soft = needed if hard == UNLIMITED else min(needed, hard)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def read_table(path: Path) -> dict[str, str]:
    """Return a kernel table of `name: value` lines; empty if there is none.

    The first value of a name counts, as that of the first processor in /proc/cpuinfo.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    table: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        table.setdefault(name.strip(), value.strip())
    return table


def table_bytes(table: Mapping[str, str], name: str) -> int:
    """Return an amount of a kernel table, which is in kB, in bytes; 0 if it is not listed."""
    return int(table.get(name, "0").split()[0]) * 1024


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far; 0 if it is unknown."""
    usage = getattr(resource, "getrusage", None)
    if usage is None:
        return 0
    peak = int(usage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def is_process_running(process: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
