"""One module per device, each with a subclass of base.py's `Device`.

There is no silent fallback to another device.
"""

from __future__ import annotations

import importlib

import torch

from ssdctl.device import hpu
from ssdctl.device.base import Device
from ssdctl.runtime.hardware import bind_to_card


def open_device(name: str, local_rank: int = 0, execution: str | None = None) -> Device:
    """Open a device by its name; `auto` is the accelerator that this machine has, else the CPU.

    Args:
        execution: How steps run (eager, compile, lazy); None is the device's default.

    Raises:
        UsageError: The machine does not have it, or it does not support that execution.
    """
    if name == "auto":
        accelerator = "hpu" if hpu.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else accelerator
    bind_to_card(name, local_rank)
    device: Device = importlib.import_module(f"{__name__}.{name}").open_device(
        local_rank, execution
    )
    return device
