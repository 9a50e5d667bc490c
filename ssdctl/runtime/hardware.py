"""Find accelerators and RDMA adapters in sysfs, without opening any device. Torch-free."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys")
PROC = Path("/proc")
HABANA, NVIDIA, GOOGLE = "0x1da3", "0x10de", "0x1ae0"  # PCI vendors
DISPLAYS = "0x03"  # PCI class of graphics and 3D controllers
TPU_V2_OR_V3 = "0x0027"  # chips of two cores
# The generations of TPUs by PCI device, as torch_xla and JAX list them.
TPUS = {
    TPU_V2_OR_V3: "TPU v2 or v3",
    "0x005e": "TPU v4",
    "0x0062": "TPU v5p",
    "0x0063": "TPU v5e",
    "0x006f": "TPU v6e",
    "0x0076": "TPU v7",
}


class Hardware(NamedTuple):
    """Cards on the PCI bus, with or without a driver, and adapters for RDMA."""

    num_gaudi: int = 0
    num_nvidia: int = 0
    tpus: tuple[str, ...] = ()  # PCI device of each chip
    has_rdma: bool = False

    @property
    def has_cards(self) -> bool:
        return bool(self.num_gaudi or self.num_nvidia)


def find_hardware() -> Hardware:
    """Return the hardware that sysfs lists."""
    vendors, tpus = [], []
    for device in sorted((SYS / "bus/pci/devices").glob("*")):
        vendor = read(device / "vendor")
        if vendor == HABANA or (vendor == NVIDIA and read(device / "class").startswith(DISPLAYS)):
            vendors.append(vendor)
        elif vendor == GOOGLE and (model := read(device / "device")) in TPUS:
            tpus.append(model)
    has_rdma = any((SYS / "class/infiniband").glob("*"))
    return Hardware(vendors.count(HABANA), vendors.count(NVIDIA), tuple(tpus), has_rdma)


def device_names() -> list[str]:
    """Return each type of card with its number, such as `2 x NVIDIA H200`; not the CPU."""
    hardware = find_hardware()
    information = (PROC / "driver/nvidia/gpus").glob("*/information")  # of NVIDIA's driver
    models = [re.search(r"Model:\s*(.+)", read(path)) for path in information]
    names = Counter(model[1] if model else "NVIDIA GPU" for model in models)
    if not names and hardware.num_nvidia:
        names["NVIDIA GPU (no driver)"] = hardware.num_nvidia
    if hardware.num_gaudi:
        names["Gaudi"] = hardware.num_gaudi
    names.update(TPUS[model] for model in hardware.tpus)
    return [f"{number} x {name}" for name, number in names.items()]


def numa_nodes_of_gaudi() -> dict[int, int]:
    """Return the NUMA node of each Gaudi card by its module, which is the local rank that uses it.

    Cards without such an entry (no driver, no NUMA) are left out.
    """
    nodes = {}
    for card in (SYS / "class/accel").glob("accel[0-9]*"):
        node = read(card / "device/numa_node")
        module = read(card / "device/module_id") or card.name.removeprefix("accel")
        if node.isdigit() and module.isdigit():  # -1: no NUMA
            nodes[int(module)] = int(node)
    return dict(sorted(nodes.items()))


def cpus_of_numa_node(node: int) -> set[int]:
    """Return the CPUs of a NUMA node, from a list such as `0-23,48-71`; empty if it is unknown."""
    cpus: set[int] = set()
    text = read(SYS / f"devices/system/node/node{node}/cpulist")
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def read(path: Path) -> str:
    """Return the stripped text of a kernel file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
