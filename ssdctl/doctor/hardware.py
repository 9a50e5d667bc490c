"""Find accelerators and RDMA adapters in sysfs, without opening any device."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

SYS = Path("/sys")
PROC = Path("/proc")
HABANA, NVIDIA = "0x1da3", "0x10de"  # PCI vendors
DISPLAYS = "0x03"  # PCI class of graphics and 3D controllers


class Hardware(NamedTuple):
    """Cards on the PCI bus, with or without a driver, and adapters for RDMA."""

    num_gaudi: int
    num_nvidia: int
    has_rdma: bool

    @property
    def has_cards(self) -> bool:
        return bool(self.num_gaudi or self.num_nvidia)


def find_hardware() -> Hardware:
    """Return the hardware that sysfs lists."""
    vendors = []
    for device in (SYS / "bus/pci/devices").glob("*"):
        vendor = read(device / "vendor")
        if vendor == HABANA or (vendor == NVIDIA and read(device / "class").startswith(DISPLAYS)):
            vendors.append(vendor)
    has_rdma = any((SYS / "class/infiniband").glob("*"))
    return Hardware(vendors.count(HABANA), vendors.count(NVIDIA), has_rdma)


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
    return [f"{number} x {name}" for name, number in names.items()]


def read(path: Path) -> str:
    """Return the stripped text of a kernel file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""
