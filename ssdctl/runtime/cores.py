"""The CPU cores that this process may use, and the limits of its cgroups (versions 1 and 2)."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from ssdctl.runtime.hardware import PROC, SYS, cpus_of_numa_node, numa_nodes_of_cards
from ssdctl.runtime.system import read_text, usable_cpus

SYSFS = Path("/sys/devices/system/cpu")
BINDING_VARIABLE = "_SSDCTL_BINDING"  # `none`: ranks keep the CPUs that they are started with
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
# Programs that have bound ranks next to their GPUs already.
BINDS_GPUS = "TORCHELASTIC_RUN_ID"


def usable_cores(world_size: int = 1) -> int:
    """Return how many threads of this process can run at the same time.

    Its affinity mask and its CPU quota, rounded up, shared with the node's ranks if the run has
    more than one.
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
    """Return socket and number of the cores of some CPUs, and whether the topology is known."""
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


def bind_to_card(device: str, local_rank: int, sysfs: Path = SYSFS) -> None:
    """Bind this rank to its part of the cores next to its card, if the driver tells where that is.

    The ranks of a node whose cards share a NUMA node get adjacent cores of it. Threads that exist
    already keep theirs, so call it before any is started. Only `hpu` and `cuda` have cards next to
    cores.
    """
    size = next((int(n) for v in LOCAL_SIZES if (n := os.environ.get(v, "")).isdigit()), 0)
    is_bound = device == "cuda" and BINDS_GPUS in os.environ
    if device not in ("hpu", "cuda") or is_bound or not size:
        return
    if os.environ.get(BINDING_VARIABLE) == "none" or not hasattr(os, "sched_setaffinity"):
        return
    if not (cpus := cpus_of_rank(numa_nodes_of_cards(device), local_rank, size, sysfs)):
        return
    before = set(usable_cpus())
    with contextlib.suppress(OSError):  # none of them is in this process's cgroup
        os.sched_setaffinity(0, cpus)
        if len(usable_cpus()) < min(len(before), len(cpus)):
            os.sched_setaffinity(0, before)


def cpus_of_rank(
    nodes: Mapping[int, int], local_rank: int, size: int, sysfs: Path = SYSFS
) -> set[int]:
    """Return the CPUs of one of `size` ranks; empty if they are unknown.

    `nodes` has the NUMA node of each card, by its number, which is that of a rank.
    """
    if not set(range(size)) <= nodes.keys():
        return set()
    neighbors = [rank for rank in range(size) if nodes[rank] == nodes[local_rank]]
    threads: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(cpus_of_numa_node(nodes[local_rank])):
        (core,) = physical_cores([cpu], sysfs)[0]
        threads.setdefault(core, []).append(cpu)
    cores, place = list(threads.values()), neighbors.index(local_rank)
    first, last = (len(cores) * n // len(neighbors) for n in (place, place + 1))
    return {cpu for core in cores[first:last] for cpu in core}


def cpu_quota(proc: Path = PROC, sys: Path = SYS) -> float | None:
    """Return how many cores' time the cgroups of this process grant; None means all."""
    quotas = []
    for folder in _cgroups("cpu", proc, sys):
        text = read_text(folder / "cpu.max")  # version 2: "200000 100000", or "max 100000"
        version_1 = (read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        numbers = text.split() or list(version_1)
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):  # not -1, max
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC, sys: Path = SYS) -> int | None:
    """Return the bytes of memory that the cgroups of this process grant; None means all."""
    names = ("memory.max", "memory.limit_in_bytes")  # versions 2 and 1
    texts = [read_text(folder / name) for folder in _cgroups("memory", proc, sys) for name in names]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def memory_kills(proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how many processes of this process's cgroup were killed for their memory so far."""
    for folder in _cgroups("memory", proc, sys):
        for name in ("memory.events", "memory.oom_control"):  # versions 2 and 1
            for line in read_text(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _cgroups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents."""
    mount = sys / "fs/cgroup"
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])
