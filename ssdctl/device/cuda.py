"""NVIDIA GPUs through PyTorch's own CUDA support. Not run on hardware yet."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.device import Decoder, Device, Module, inductor
from ssdctl.errors import UsageError
from ssdctl.runtime.packages import torch_warnings_ignored
from ssdctl.runtime.system import Overridden

NATIVE_BF16, TENSOR_CORES = (8, 0), (7, 0)  # compute capabilities
STEPS_IN_FLIGHT = 2


def _read() -> tuple[str, bool, bool, int]:
    cudnn = torch.backends.cudnn
    # Some versions warn about these names, but their compiler still reads them.
    with torch_warnings_ignored():
        try:
            products, tf32 = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        except RuntimeError as error:  # the program uses `fp32_precision`
            hint = "use torch.set_float32_matmul_precision in place of `fp32_precision`"
            raise UsageError(f"TF32: {str(error).splitlines()[0]}", hint=hint) from None
    return products, tf32, cudnn.benchmark, cudnn.benchmark_limit or 0


def _write(values: tuple[str, bool, bool, int]) -> None:
    cudnn = torch.backends.cudnn
    with torch_warnings_ignored():
        torch.set_float32_matmul_precision(values[0])
        cudnn.allow_tf32 = values[1]
    cudnn.benchmark, cudnn.benchmark_limit = values[2:]


_SETTINGS = Overridden(_read, _write)


class Cuda(Device):
    name = "cuda"
    backend = "cpu:gloo,cuda:nccl"  # ranks exchange everything but gradients over gloo
    bounds_queue = True
    ddp_bucket_mb = 25  # gradients are 80 MB: several buckets
    supports_found_inf = True
    has_sync_bn = True
    # Raised by graph capture and libraries.
    memory_errors = ("cuda error: out of memory", "status_alloc_failed")

    def __init__(self, local_rank: int, execution: str | None = None) -> None:
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)
        self.label = torch.cuda.get_device_name(self.torch_device)
        capability = torch.cuda.get_device_capability(self.torch_device)
        # fp16 with loss scaling on older tensor cores.
        older = "fp16" if capability >= TENSOR_CORES else "fp32"
        self.auto_precision = "bf16" if capability >= NATIVE_BF16 else older
        wanted = DEVICE_TYPES["cuda"].choose_execution(execution)
        self.execution, self.notices = inductor.resolve_execution(wanted, capability)
        self._copies = torch.cuda.Stream(self.torch_device)
        self._steps: deque[torch.cuda.Event] = deque()  # in flight
        self.decoder = Decoder(local_rank, self._receive)

    @property
    def forms(self) -> tuple[str, ...]:
        compiled = ("gpu",) if self.execution == "compile" else ()
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        return (*compiled, "no_scatter") if is_deterministic else compiled

    def place(self, model: Module) -> Module:
        return model.to(self.torch_device).to(memory_format=torch.channels_last)

    def settings(self, *, tf32: bool) -> contextlib.AbstractContextManager[None]:
        # PyTorch's own default is TF32 for convolutions, which is less precise than fp32.
        # Shapes are static: each kernel is searched for once, among all, not 10.
        return _SETTINGS.by(("high" if tf32 else "highest", tf32, True, 0))

    def compile(self, module: nn.Module, *, overlap: bool = False) -> None:
        if self.execution == "compile":
            inductor.keep_pool_backward()
            options = inductor.gpu_options(module)
            inductor.compile_in_place(module, self.blocks, overlap=overlap, options=options)

    def host_buffer(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)

    def copy(self, tensor: Tensor) -> Tensor:
        # A pinned copy is freed at once; its memory is used again only after the transfer.
        pinned = tensor.pin_memory()  # no copy if it is a part of a host buffer
        with torch.cuda.stream(self._copies):
            copied = pinned.to(self.torch_device, non_blocking=True)
        copied.record_stream(torch.cuda.current_stream(self.torch_device))
        return copied

    def wait_for_reads(self) -> None:
        # The copies were queued before the last step was: this rarely waits.
        self._copies.record_event(torch.cuda.Event(blocking=True)).synchronize()

    def _receive(self, shape: tuple[int, ...], fill: Callable[[Tensor, Any], object]) -> Tensor:
        with torch.cuda.stream(self._copies):
            received = torch.empty(shape, dtype=torch.uint8, device=self.torch_device)
            fill(received, self._copies)
        received.record_stream(torch.cuda.current_stream(self.torch_device))
        return received

    def wait_for_copies(self) -> None:
        stream = torch.cuda.current_stream(self.torch_device)
        stream.wait_stream(self._copies)
        # Each queued batch takes GPU memory: the host stays at most a few steps ahead.
        self._steps.append(stream.record_event(torch.cuda.Event(blocking=True)))
        if len(self._steps) > STEPS_IN_FLIGHT:
            self._steps.popleft().synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_memory_bytes(self) -> int:
        # Reserved, not allocated: the counters of allocated memory exclude the pool of a CUDA
        # graph, which nothing else can use. `memory_bytes` counts in the same way.
        return torch.cuda.max_memory_reserved(self.torch_device)

    def memory_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free + torch.cuda.memory_reserved(self.torch_device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)


def open_device(local_rank: int, execution: str | None) -> Cuda:
    if not torch.cuda.is_available():
        raise UsageError(
            "device cuda: PyTorch finds no GPU on this machine",
            hint="nvidia-smi shows whether the driver finds one; --device cpu needs none",
        )
    count = torch.cuda.device_count()
    if count == 1 and "SLURM_LOCALID" in os.environ:
        local_rank = 0  # srun can show each task only its own GPU (--gpus-per-task)
    if local_rank >= count:
        raise UsageError(f"device cuda: local rank {local_rank} has no GPU; this node has {count}")
    return Cuda(local_rank, execution)
