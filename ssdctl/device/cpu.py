"""The CPU: channels-last convolutions by oneDNN, bf16 if the processor has it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from torch import Tensor, nn

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.device import inductor
from ssdctl.device.base import Device, Module, channels_last, choose_execution
from ssdctl.runtime import system

PROC = Path("/proc")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, as /proc/cpuinfo names them
# Parts of the messages of PyTorch's and oneDNN's allocators when memory is full.
ALLOCATION_FAILED = ("can't allocate memory", "could not create a memory object", "bad_alloc")


class Cpu(Device):
    """The processors of this machine."""

    name = "cpu"
    backend = "gloo"
    precisions = DEVICE_TYPES["cpu"].precisions
    is_host = True
    bounds_queue = True
    supports_found_inf = True

    def __init__(self, execution: str | None = None) -> None:
        self.torch_device = torch.device("cpu")
        execution_mode = choose_execution("cpu", execution)
        self.execution, self.notices = inductor.resolve_execution(execution_mode)
        facts = system.read_table(PROC / "cpuinfo")
        self.label = facts.get("model name", platform.processor() or "CPU")
        flags = (facts.get("flags") or facts.get("Features") or "").split()
        self.has_native_bf16 = bool(BF16_FLAGS.intersection(flags))
        self.auto_precision = "bf16" if self.has_native_bf16 else "fp32"
        # Eager steps use `sum_over_ranks`: DistributedDataParallel imports the compiler, which
        # takes 8 seconds of CPU time in each rank.
        self.ddp_bucket_mb = 100 if self.execution == "compile" else None

    @property
    def forms(self) -> tuple[str, ...]:
        return ("compiled",) if self.execution == "compile" else ()

    def place(self, model: Module) -> Module:
        return channels_last(model.to(self.torch_device))

    def compile(self, module: nn.Module) -> None:
        if self.execution == "compile":
            inductor.compile_in_place(module)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def sum_over_ranks(self, tensors: list[Tensor]) -> None:
        # By one call, on a flat copy.
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.all_reduce(flat)
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
        soft, _ = system.resource_limit("AS") or (system.UNLIMITED, 0)
        if soft != system.UNLIMITED:  # it counts addresses, most of which hold no memory
            limits.append(soft - system.table_bytes(status, "VmSize") + resident)
        return max(min(limits), 0)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and any(w in str(error) for w in ALLOCATION_FAILED)
        )


def open_cpu(local_rank: int, execution: str | None) -> Cpu:
    return Cpu(execution)
