"""Limits that the cgroups of this process set, for versions 1 and 2. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")


def cpu_quota(proc: Path = PROC, sys: Path = SYS) -> float | None:
    """Return how many cores' time the cgroups of this process grant; None means all.

    Args:
        proc: The folder with `self/cgroup`.
        sys: The folder with `fs/cgroup`.
    """
    quotas = []
    for folder in _cgroups("cpu", proc, sys):
        text = _read(folder / "cpu.max")  # version 2: "200000 100000", or "max 100000"
        if not text:
            text = " ".join(_read(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
        numbers = text.split()
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):  # not -1, max
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC, sys: Path = SYS) -> int | None:
    """Return the bytes of memory that the cgroups of this process grant; None means all."""
    limits = []
    for folder in _cgroups("memory", proc, sys):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def memory_kills(proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how many processes of this process's cgroup were killed for their memory so far."""
    for folder in _cgroups("memory", proc, sys):
        for name in ("memory.events", "memory.oom_control"):  # versions 2 and 1
            for line in _read(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _cgroups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents."""
    mount = sys / "fs/cgroup"
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
