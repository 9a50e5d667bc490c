"""NVIDIA GPUs through PyTorch's own CUDA support."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ssdctl.device.base import Module, channels_last
from ssdctl.errors import UsageError


class Cuda:
    """See `ssdctl.device.base.Device`."""

    name = "cuda"
    backend = "nccl"
    precisions: tuple[str, ...] = ("bf16", "fp32")

    def __init__(self, local_rank: int) -> None:
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)
        self.label = torch.cuda.get_device_name(self.torch_device)
        self.has_native_bf16 = torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    def place(self, model: Module) -> Module:
        return channels_last(model.to(self.torch_device))

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16")

    def register_backend(self) -> None:
        pass

    def mark_step(self) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)


def is_there() -> bool:
    """Whether this machine has a GPU that PyTorch can use."""
    return torch.cuda.is_available()


def open_cuda(local_rank: int) -> Cuda:
    """This process's GPU.

    Raises:
        UsageError: There is none, or fewer than local ranks.
    """
    if not is_there():
        raise UsageError(
            "device cuda: PyTorch sees no GPU on this machine",
            hint="nvidia-smi shows whether the driver sees one; --device cpu trains without",
        )
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"device cuda: local rank {local_rank} has no GPU; this node has "
            f"{torch.cuda.device_count()}"
        )
    return Cuda(local_rank)
