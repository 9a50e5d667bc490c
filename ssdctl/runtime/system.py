"""What the operating system grants: CPUs, limits, memory, cache folders. Torch-free.

Only Linux is tested. CPU affinity and /proc are absent on macOS: there the functions return that
the answer is unknown.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import stat
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, in /proc/cpuinfo
UNLIMITED = resource.RLIM_INFINITY  # a limit that is not set
RESERVED_FILES = 512  # for everything but the store
NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.ceph", "gpfs", "beegfs", "pvfs2"),
    *("afs", "9p", "fuse.sshfs", "fuse.glusterfs", "glusterfs", "wekafs"),
}
MOUNTS = Path("/proc/mounts")


def usable_cpus() -> Collection[int]:
    """Return the numbers of the CPUs that this process may use; all, if it cannot be restricted."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def resource_limit(name: str) -> tuple[int, int] | None:
    """Return the soft and the hard limit of a resource, or `UNLIMITED`; None if it is unknown.

    `name` is one of the module `resource`: `NOFILE`, `MEMLOCK`, `AS`.
    """
    number = getattr(resource, f"RLIMIT_{name}", None)
    return None if number is None else resource.getrlimit(number)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, if `count` more need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + RESERVED_FILES
    if soft == UNLIMITED or soft >= needed:
        return
    soft = needed if hard == UNLIMITED else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def read_text(path: Path) -> str:
    """Return the stripped text of a kernel file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def read_table(path: Path) -> dict[str, str]:
    """Return a kernel table of `name: value` lines; empty if there is none.

    The first value of a name counts, as that of the first processor in /proc/cpuinfo.
    """
    table: dict[str, str] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        table.setdefault(name.strip(), value.strip())
    return table


def processor() -> tuple[str, bool]:
    """Return the name of the processor, empty if it is unknown, and whether it computes in bf16."""
    facts = read_table(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return facts.get("model name", platform.processor()), not BF16_FLAGS.isdisjoint(flags)


def table_bytes(table: Mapping[str, str], name: str) -> int:
    """Return an amount of a kernel table, which is in kB, in bytes; 0 if it is not listed."""
    return int(table.get(name, "0").split()[0]) * 1024


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_process_running(process: int) -> bool:
    """Return whether a process of this machine exists."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def private_cache_dir(name: str) -> Path | None:
    """Return `$TMPDIR/ssdctl-UID/NAME` (or in /tmp), created for this user only.

    None if another user owns that path, if it is a symbolic link, or if others may write to it:
    anybody may create names in a shared temporary folder.
    """
    root = Path(os.environ.get("TMPDIR") or "/tmp", f"ssdctl-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_own or status.st_mode & 0o077:
            return None
        folder = root / name
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def is_on_network(path: Path) -> bool:
    """Return whether a path is on a file system of another machine; False if that is unknown."""
    resolved, longest, kind = path.resolve(), "", ""
    for line in read_text(MOUNTS).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        folder = fields[1].replace("\\040", " ")
        if len(folder) >= len(longest) and resolved.is_relative_to(folder):
            longest, kind = folder, fields[2]
    return kind in NETWORK_FILE_SYSTEMS
