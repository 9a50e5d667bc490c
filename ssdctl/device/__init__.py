"""One file a device, behind base.py's protocol. Never a silent fallback to another device."""

from __future__ import annotations

from collections.abc import Callable

from ssdctl.device import cpu, cuda, hpu, xla
from ssdctl.device.base import Device

OPENERS: dict[str, Callable[[int, str | None], Device]] = {
    "cpu": cpu.open_cpu,
    "cuda": cuda.open_cuda,
    "hpu": hpu.open_hpu,
    "xla": xla.open_xla,
}


def open_device(name: str, local_rank: int = 0, execution: str | None = None) -> Device:
    """Open a device by its name; `auto` is the accelerator that this machine has, else the CPU.

    Args:
        name: As in `--device`.
        local_rank: Which of the node's devices.
        execution: How steps are to run (eager, compile, lazy); None leaves it to the device.

    Raises:
        UsageError: The machine lacks it, or it cannot run so; the message says what to do.
    """
    if name == "auto":
        name = next(
            (n for n, there in (("cuda", cuda.is_there), ("hpu", hpu.is_there)) if there()), "cpu"
        )
    return OPENERS[name](local_rank, execution)
