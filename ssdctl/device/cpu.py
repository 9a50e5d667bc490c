"""The CPU: channels-last convolutions by oneDNN, bf16 if the processor has it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.device import Device, Module, inductor
from ssdctl.runtime import system

PROC = Path("/proc")


class Cpu(Device):
    name = "cpu"
    backend = "gloo"
    is_host = True
    bounds_queue = True
    supports_found_inf = True
    # Raised by PyTorch's and oneDNN's allocators.
    memory_errors = system.MEMORY_ERRORS

    def __init__(self, execution: str | None = None) -> None:
        self.torch_device = torch.device("cpu")
        wanted = DEVICE_TYPES["cpu"].choose_execution(execution)
        self.execution, self.notices = inductor.resolve_execution(wanted)
        name, has_native_bf16 = system.processor()
        self.label = name or "CPU"
        self.auto_precision = "bf16" if has_native_bf16 else "fp32"
        # Eager steps use `sum_over_ranks`: DistributedDataParallel imports the compiler, which
        # takes 8 seconds of CPU time in each rank.
        self.ddp_bucket_mb = 100 if self.execution == "compile" else None

    @property
    def forms(self) -> tuple[str, ...]:
        return ("compiled",) if self.execution == "compile" else ()

    def place(self, model: Module) -> Module:
        return model.to(self.torch_device).to(memory_format=torch.channels_last)

    def compile(self, module: nn.Module, *, overlap: bool = False) -> None:
        if self.execution == "compile":
            inductor.compile_in_place(module, self.blocks, overlap=overlap)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def sum_over_ranks(self, tensors: list[Tensor], group: Any = None) -> None:
        # By one call, on a flat copy.
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat, group=group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def synchronize(self) -> None:
        pass

    def peak_memory_bytes(self) -> int:
        return system.peak_memory_bytes()

    def memory_bytes(self) -> int | None:
        available = system.table_bytes(system.read_table(PROC / "meminfo"), "MemAvailable")
        if not available:
            return None  # not Linux
        status = system.read_table(PROC / "self/status")
        resident = system.table_bytes(status, "VmRSS")
        limits = [available + resident]
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != system.UNLIMITED:  # a limit of addresses, most of which hold no memory
            limits.append(soft - system.table_bytes(status, "VmSize") + resident)
        return max(min(limits), 0)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or super().is_out_of_memory(error)


def open_device(local_rank: int, execution: str | None) -> Cpu:
    return Cpu(execution)
