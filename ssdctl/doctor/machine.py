"""Check cores, NUMA nodes and memory, and the limits that a container or batch system sets."""

from __future__ import annotations

import math
import os

from ssdctl.doctor import hardware
from ssdctl.doctor.check import OK, WARN, CheckResult
from ssdctl.launch.node import read_node
from ssdctl.runtime.cgroups import cpu_quota, memory_limit
from ssdctl.runtime.system import read_table, table_bytes, usable_cpus

LITTLE_MEMORY = 4 * 2**30


def check_machine() -> list[CheckResult]:
    """Return the results for cores and memory."""
    return [_cores(), _memory()]


def _cores() -> CheckResult:
    cpus = len(usable_cpus())
    node = read_node(hardware.SYS / "devices/system/cpu")
    numa = len(list((hardware.SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    detail = f"{cpus} usable of {os.cpu_count()}"
    if node.has_topology:
        detail += f": {node.cores} physical on {node.sockets} socket(s), {numa} NUMA node(s)"
    else:
        detail += ", without topology (a VM): mpirun maps ranks by slot"
    quota = cpu_quota(hardware.PROC, hardware.SYS)
    if quota is not None and quota < cpus:
        detail += f"; the cgroup grants {quota:g}"
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > math.ceil(quota):
            remedy = "threads beyond it are throttled: unset it, or raise the container's limit"
            return CheckResult("cores", WARN, f"{detail}, OMP_NUM_THREADS is {threads}", remedy)
    return CheckResult("cores", OK, detail)


def _memory() -> CheckResult:
    table = read_table(hardware.PROC / "meminfo")
    total, available = (table_bytes(table, name) for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(hardware.PROC, hardware.SYS)
    detail = f"{available / 2**30:.0f} GiB available of {total / 2**30:.0f}"
    if limit is not None and limit < total:
        detail += f"; the cgroup grants {limit / 2**30:.1f} GiB"
        available = min(available, limit)
    if available < LITTLE_MEMORY:
        remedy = "end other programs or raise the limit; a smaller --bs needs less"
        return CheckResult("memory", WARN, detail, remedy)
    return CheckResult("memory", OK, detail)
