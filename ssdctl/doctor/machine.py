"""Check cores, NUMA nodes and memory, and the limits that a container or batch system sets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ssdctl.doctor import hardware
from ssdctl.doctor.check import OK, WARN, CheckResult
from ssdctl.launch.node import read_node
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.system import read_table, table_bytes

LITTLE_MEMORY = 4 * 2**30


def check_machine() -> list[CheckResult]:
    """Return the results for cores and memory."""
    return [_cores(), _memory()]


def _cores() -> CheckResult:
    usable = usable_cores()
    node = read_node(hardware.SYS / "devices/system/cpu")
    numa = len(list((hardware.SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    detail = f"{usable} usable of {os.cpu_count()}"
    if node.has_topology:
        detail += f": {node.cores} physical on {node.sockets} socket(s), {numa} NUMA node(s)"
    else:
        detail += ", without topology (a VM): mpirun maps ranks by slot"
    quota = _cpu_quota()
    if quota is not None and quota < usable:
        workers = max(int(quota), 1)
        remedy = (
            f"threads beyond it are throttled: --workers {workers}, OMP_NUM_THREADS={workers}; or "
            "raise the container's limit"
        )
        return CheckResult("cores", WARN, f"{detail}; the cgroup grants {quota:g}", remedy)
    return CheckResult("cores", OK, detail)


def _memory() -> CheckResult:
    table = read_table(hardware.PROC / "meminfo")
    total, available = (table_bytes(table, name) for name in ("MemTotal", "MemAvailable"))
    limit = _memory_limit()
    detail = f"{available / 2**30:.0f} GiB available of {total / 2**30:.0f}"
    if limit is not None and limit < total:
        detail += f"; the cgroup grants {limit / 2**30:.1f} GiB"
        available = min(available, limit)
    if available < LITTLE_MEMORY:
        remedy = "end other programs or raise the limit; a smaller --bs needs less"
        return CheckResult("memory", WARN, detail, remedy)
    return CheckResult("memory", OK, detail)


def _cpu_quota() -> float | None:
    """Return the number of cores that the cgroups of this process grant; None means all."""
    quotas = []
    for folder in _cgroups("cpu"):
        text = hardware.read(folder / "cpu.max")  # version 2: "200000 100000", or "max 100000"
        if not text:
            parts = [hardware.read(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period")]
            text = " ".join(parts)
        numbers = text.split()
        if len(numbers) == 2 and all(n.isdigit() for n in numbers):  # -1 and max: no limit
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def _memory_limit() -> int | None:
    """Return the bytes of memory that the cgroups of this process grant; None means all."""
    limits = []
    for folder in _cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = hardware.read(folder / name)
            if text.isdigit():
                limits.append(int(text))
    return min(limits, default=None)


def _cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents, for cgroup v1 and v2."""
    mount = hardware.SYS / "fs/cgroup"
    for line in hardware.read(hardware.PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])
