"""Find accelerators and RDMA adapters in sysfs, without opening any device. Torch-free."""

from __future__ import annotations

import contextlib
import os
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


def numa_nodes_of_cards(device: str) -> dict[int, int]:
    """Return the NUMA node of each card that this process sees, by its number among them.

    A Gaudi card's number is its module, an NVIDIA card's the order of addresses on the PCI bus,
    after HABANA_VISIBLE_MODULES or CUDA_VISIBLE_DEVICES. Empty if the driver does not tell.

    Args:
        device: `hpu` or `cuda`.
    """
    if device == "hpu":
        visible = os.environ.get("HABANA_VISIBLE_MODULES", "")
        paths = [card / "device" for card in (SYS / "class/accel").glob("accel[0-9]*")]
        cards = {
            read(path / "module_id") or path.parent.name[len("accel") :]: path for path in paths
        }
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        buses = sorted((SYS / "bus/pci/devices").glob("*"))
        gpus = [p for p in buses if read(p / "vendor") == NVIDIA]
        gpus = [p for p in gpus if read(p / "class").startswith(DISPLAYS)]
        cards = {str(number): path for number, path in enumerate(gpus)}
    nodes = {
        int(number): int(node)
        for number, path in cards.items()
        if number.isdigit() and (node := read(path / "numa_node")).isdigit()  # -1: no NUMA
    }
    if not re.fullmatch(r"\d+(,\d+)*", visible):  # all, or identifiers
        return dict(sorted(nodes.items())) if visible in ("", "all") else {}
    chosen = [int(number) for number in visible.split(",")]
    return (
        {place: nodes[n] for place, n in enumerate(chosen)} if set(chosen) <= nodes.keys() else {}
    )


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
