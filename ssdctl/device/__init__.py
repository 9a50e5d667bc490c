"""One module per device, each with a subclass of base.py's `Device`.

There is no silent fallback to another device.
"""

from __future__ import annotations

from collections.abc import Callable

from ssdctl.device import cpu, cuda, hpu, xla
from ssdctl.device.base import Device
from ssdctl.runtime.cores import bind_to_card

OPENERS: dict[str, Callable[[int, str | None], Device]] = {
    "cpu": cpu.open_cpu,
    "cuda": cuda.open_cuda,
    "hpu": hpu.open_hpu,
    "xla": xla.open_xla,
}


def open_device(name: str, local_rank: int = 0, execution: str | None = None) -> Device:
    """Open a device by its name; `auto` is the accelerator that this machine has, else the CPU.

    Args:
        execution: How steps run (eager, compile, lazy); None is the device's default.

    Raises:
        UsageError: The machine does not have it, or it does not support that execution.
    """
    if name == "auto":
        name = next(
            (n for n, test in (("cuda", cuda.is_available), ("hpu", hpu.is_available)) if test()),
            "cpu",
        )
    bind_to_card(name, local_rank)
    return OPENERS[name](local_rank, execution)
