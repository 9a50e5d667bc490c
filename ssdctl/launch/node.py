"""Read the physical cores and sockets of this machine from sysfs."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ssdctl.runtime.cores import SYSFS, physical_cores, quota_cores
from ssdctl.runtime.system import usable_cpus

PCI = Path("/sys/bus/pci/devices")
TPU_V2_OR_V3 = ("0x1ae0", "0x0027")  # PCI vendor and device: chips of two cores


@dataclass(frozen=True)
class Node:
    """One machine. The hyper-threads of a core count once, if the topology is known."""

    cores: int
    sockets: int
    has_topology: bool = True
    has_numactl: bool = False  # the program that torchrun binds ranks with
    two_core_tpus: int = 0  # chips of TPU v2 or v3
    quota: int | None = None  # cores' time that the cgroups of this process grant, rounded up

    @property
    def local_cores(self) -> int:
        """Return the cores whose time the ranks on this machine can use."""
        return min(self.cores, self.quota or self.cores)


def read_node(sysfs: Path = SYSFS, allowed: Collection[int] | None = None, pci: Path = PCI) -> Node:
    """Return the part of this machine that this process may use.

    Args:
        sysfs: The folder with `cpu0/topology/` and its siblings.
        allowed: Logical CPUs to count; None is this process's affinity.
        pci: The folder of PCI devices.
    """
    cores, has_topology = physical_cores(usable_cpus() if allowed is None else allowed, sysfs)
    sockets = len({socket for socket, _ in cores})
    has_numactl = shutil.which("numactl") is not None
    two_core_tpus = sum(_pci_id(device) == TPU_V2_OR_V3 for device in pci.glob("*"))
    return Node(
        max(1, len(cores)), max(1, sockets), has_topology, has_numactl, two_core_tpus, quota_cores()
    )


def _pci_id(device: Path) -> tuple[str, str]:
    """Return vendor and device of a PCI device; empty texts if they cannot be read."""
    try:
        vendor, model = ((device / name).read_text().strip() for name in ("vendor", "device"))
    except OSError:
        return ("", "")
    return vendor, model
