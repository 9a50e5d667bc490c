"""Read the physical cores and sockets of this machine from sysfs."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ssdctl.runtime.cores import SYSFS, physical_cores, quota_cores
from ssdctl.runtime.hardware import TPU_V2_OR_V3, find_hardware
from ssdctl.runtime.system import usable_cpus


@dataclass(frozen=True)
class Node:
    """One machine. The hyper-threads of a core count once, if the topology is known."""

    cores: int
    sockets: int
    has_topology: bool = True
    has_numactl: bool = False  # the program that torchrun binds ranks with
    tpus: int = 0  # chips; 0 also if the PCI bus cannot be read
    has_two_core_tpus: bool = False  # v2 or v3
    quota: int | None = None  # cores' time that the cgroups of this process grant, rounded up

    @property
    def local_cores(self) -> int:
        """Return the cores whose time the ranks on this machine can use."""
        return min(self.cores, self.quota or self.cores)


def read_node(sysfs: Path = SYSFS, allowed: Collection[int] | None = None) -> Node:
    """Return the part of this machine that this process may use.

    Args:
        sysfs: The folder with `cpu0/topology/` and its siblings.
        allowed: Logical CPUs to count; None is this process's affinity.
    """
    cores, has_topology = physical_cores(usable_cpus() if allowed is None else allowed, sysfs)
    sockets = len({socket for socket, _ in cores})
    tpus = find_hardware().tpus
    return Node(
        max(1, len(cores)),
        max(1, sockets),
        has_topology,
        has_numactl=shutil.which("numactl") is not None,
        tpus=len(tpus),
        has_two_core_tpus=TPU_V2_OR_V3 in tpus,
        quota=quota_cores(),
    )
