"""The CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from ssdctl.runtime.cgroups import cpu_quota
from ssdctl.runtime.system import usable_cpus

SYSFS = Path("/sys/devices/system/cpu")


def usable_cores(world_size: int = 1) -> int:
    """Return how many threads of this process can run at the same time.

    Its affinity mask and its CPU quota, rounded up, shared with the node's ranks.

    Args:
        world_size: Number of ranks of the run.
    """
    cores, quota = len(usable_cpus()), cpu_quota()
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    if world_size > 1:
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The cores that Slurm gave to a task; not every site binds the task to them.
        cores = min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", cores)))
    return max(cores, 1)


def quota_cores() -> int | None:
    """Return this process's CPU quota, rounded up; None if it has as many physical cores or fewer.

    Libraries start a thread for each physical core of the affinity mask; they ignore the quota.
    """
    quota = cpu_quota()
    if quota is None or math.ceil(quota) >= len(physical_cores(usable_cpus())[0]):
        return None
    return math.ceil(quota)


def physical_cores(cpus: Collection[int], sysfs: Path = SYSFS) -> tuple[set[tuple[int, int]], bool]:
    """Return socket and number of the cores of some CPUs, and whether the topology is known.

    Args:
        cpus: Logical CPUs.
        sysfs: The folder with `cpu0/topology/` and its siblings.
    """
    cores, has_topology = set(), True
    for cpu in cpus:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            cores.add((socket, int((topology / "core_id").read_text())))
        except (OSError, ValueError):  # a VM without topology: each CPU is a core of one socket
            cores.add((0, cpu))
            has_topology = False
    return cores, has_topology
