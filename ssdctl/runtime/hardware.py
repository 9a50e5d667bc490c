"""Find accelerators in sysfs, without opening any device, and bind a rank to the
cores next to its card."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ssdctl.runtime.system import SYSFS, physical_cores, read_text, usable_cpus

SYS = Path("/sys")
PROC = Path("/proc")
HABANA, NVIDIA, GOOGLE = "0x1da3", "0x10de", "0x1ae0"  # PCI vendors
DISPLAYS = "0x03"  # PCI class of graphics and 3D controllers


class TpuType(NamedTuple):
    name: str
    # How many chips of a host TorchTPU can use; empty for chips with two cores, which need
    # torch_xla.
    counts: tuple[int, ...] = ()

    @property
    def has_two_cores(self) -> bool:
        return not self.counts


# By PCI device and by the version's name, as torch_xla, JAX and TorchTPU list them.
_TPUS = (
    ("0x0027", ("v2", "v3"), TpuType("TPU v2 or v3")),
    ("0x005e", ("v4",), TpuType("TPU v4", (1, 2, 4, 8))),
    ("0x0062", ("v5p",), TpuType("TPU v5p", (1, 2, 4, 8))),
    ("0x0063", ("v5e",), TpuType("TPU v5e", (1, 4, 8))),
    ("0x006f", ("v6e",), TpuType("TPU v6e", (1, 4, 8))),
    ("0x0076", ("v7",), TpuType("TPU v7", (2, 4, 8))),
)
TPUS = {device: kind for device, _, kind in _TPUS}
TPU_VERSIONS = {version: kind for _, versions, kind in _TPUS for version in versions}
BINDING_VARIABLE = "_SSDCTL_BINDING"  # `none`: ranks keep the CPUs that they are started with
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
BINDS_GPUS = "TORCHELASTIC_RUN_ID"  # set by torchrun, which binds ranks next to their GPUs itself


class Hardware(NamedTuple):
    """Cards on the PCI bus, with or without a driver."""

    num_gaudi: int = 0
    num_nvidia: int = 0
    tpus: tuple[TpuType, ...] = ()  # of each chip


def find_hardware() -> Hardware:
    chips = [read_text(path / "device") for path in _pci_devices(GOOGLE)]
    tpus = tuple(TPUS[chip] for chip in chips if chip in TPUS)
    return Hardware(len(_pci_devices(HABANA)), len(_nvidia_gpus()), tpus)


def _pci_devices(vendor: str) -> list[Path]:
    devices = sorted((SYS / "bus/pci/devices").glob("*"))
    return [path for path in devices if read_text(path / "vendor") == vendor]


def _nvidia_gpus() -> list[Path]:
    cards = _pci_devices(NVIDIA)
    return [path for path in cards if read_text(path / "class").startswith(DISPLAYS)]


def device_names() -> list[str]:
    """Return each type of card with its number, such as `2 x NVIDIA H200`; not the CPU."""
    hardware = find_hardware()
    information = (PROC / "driver/nvidia/gpus").glob("*/information")  # by NVIDIA's driver
    models = [re.search(r"Model:\s*(.+)", read_text(path)) for path in information]
    names = Counter(model[1] if model else "NVIDIA GPU" for model in models)
    if not names and hardware.num_nvidia:
        names["NVIDIA GPU (no driver)"] = hardware.num_nvidia
    if hardware.num_gaudi:
        names["Gaudi"] = hardware.num_gaudi
    names.update(chip.name for chip in hardware.tpus)
    return [f"{number} x {name}" for name, number in names.items()]


def numa_nodes_of_cards(device: str) -> dict[int, int]:
    """Return the NUMA node of each card (`hpu` or `cuda`) of this process, by its number.

    A Gaudi card's number is its module, an NVIDIA card's the order of addresses on the PCI bus,
    after HABANA_VISIBLE_MODULES or CUDA_VISIBLE_DEVICES. Empty if the driver does not tell.
    """
    if device == "hpu":
        visible = os.environ.get("HABANA_VISIBLE_MODULES", "")
        folders = (SYS / "class/accel").glob("accel[0-9]*")
        paths = {folder.name[len("accel") :]: folder / "device" for folder in folders}
        cards = {read_text(path / "module_id") or number: path for number, path in paths.items()}
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        cards = {str(number): path for number, path in enumerate(_nvidia_gpus())}
    nodes = {
        int(number): int(node)
        for number, path in cards.items()
        if number.isdigit() and (node := read_text(path / "numa_node")).isdigit()  # -1: no NUMA
    }
    if not re.fullmatch(r"\d+(,\d+)*", visible):  # all, or identifiers
        return dict(sorted(nodes.items())) if visible in ("", "all") else {}
    chosen = [int(number) for number in visible.split(",")]
    is_known = set(chosen) <= nodes.keys()
    return {index: nodes[n] for index, n in enumerate(chosen)} if is_known else {}


def bind_to_card(device: str, local_rank: int) -> None:
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
    if not (cpus := cpus_of_rank(numa_nodes_of_cards(device), local_rank, size)):
        return
    before = set(usable_cpus())
    with contextlib.suppress(OSError):  # this process's cgroup has none of these CPUs
        os.sched_setaffinity(0, cpus)
        if len(usable_cpus()) < min(len(before), len(cpus)):
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def cores_kept() -> Iterator[None]:
    """Let this thread run on the same cores after the block as before it."""
    before = set(usable_cpus())
    try:
        yield
    finally:
        if set(usable_cpus()) != before:
            os.sched_setaffinity(0, before)


def cpus_of_rank(
    nodes: Mapping[int, int], local_rank: int, size: int, sysfs: Path = SYSFS
) -> set[int]:
    """Return the CPUs of one of `size` ranks; empty if they are unknown.

    Args:
        nodes: The NUMA node of each card; a card has the number of its rank.
    """
    if not set(range(size)) <= nodes.keys():
        return set()
    node = nodes[local_rank]
    neighbors = [rank for rank in range(size) if nodes[rank] == node]
    threads: dict[tuple[int, int], list[int]] = {}
    text = read_text(SYS / f"devices/system/node/node{node}/cpulist")  # such as 0-23,48-71
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        for cpu in range(int(first), int(last or first) + 1):
            (core,) = physical_cores([cpu], sysfs)[0]
            threads.setdefault(core, []).append(cpu)
    cores, index = list(threads.values()), neighbors.index(local_rank)
    first, last = (len(cores) * n // len(neighbors) for n in (index, index + 1))
    return {cpu for core in cores[first:last] for cpu in core}
