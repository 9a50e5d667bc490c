"""Intel Gaudi through habana_frameworks, which the vendor's image brings.

The import of the bridge registers the device "hpu" with PyTorch. Not run on hardware yet.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import torch

from ssdctl.device.base import Module, channels_last
from ssdctl.errors import UsageError

BRIDGE = "habana_frameworks"


class Hpu:
    """See `ssdctl.device.base.Device`."""

    name = "hpu"
    label = "Intel Gaudi"
    backend = "hccl"
    has_native_bf16 = True
    precisions: tuple[str, ...] = ("bf16", "fp32")

    def __init__(self) -> None:
        self._core = importlib.import_module(f"{BRIDGE}.torch.core")
        self._hpu = importlib.import_module(f"{BRIDGE}.torch.hpu")
        self.torch_device = torch.device("hpu")

    def place(self, model: Module) -> Module:
        return channels_last(model.to(self.torch_device))

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("hpu", torch.bfloat16, enabled=precision == "bf16")

    def register_backend(self) -> None:
        importlib.import_module(f"{BRIDGE}.torch.distributed.hccl")

    def mark_step(self) -> None:
        self._core.mark_step()

    def synchronize(self) -> None:
        self._hpu.synchronize()

    def peak_memory_bytes(self) -> int:
        return int(self._hpu.max_memory_allocated())


def is_there() -> bool:
    """Whether the bridge is installed."""
    return importlib.util.find_spec(BRIDGE) is not None


def open_hpu(local_rank: int) -> Hpu:
    """This process's Gaudi card.

    Raises:
        UsageError: The bridge is absent, or it finds no card.
    """
    if not is_there():
        raise UsageError(
            f"device hpu: the Gaudi bridge ({BRIDGE}) is not installed here",
            hint="run inside the vendor's PyTorch image for Gaudi, and install ssdctl there with "
            "pip install --no-deps so that its torch stays",
        )
    try:
        return Hpu()
    except RuntimeError as error:
        if "acquire failed" not in str(error):
            raise
        raise UsageError(
            "device hpu: no free Gaudi card: another process holds it",
            hint="hl-smi lists the processes that hold cards",
        ) from error
