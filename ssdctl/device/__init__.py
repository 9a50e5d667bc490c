"""One file per device, each with a subclass of `Device`; other packages use devices through it.

A plugin is the module of an entry point in the group `ssdctl.devices`, with `TYPE`, a `DeviceType`,
and `open_device`. Importing it does not import torch.

There is no silent fallback to another device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ssdctl.errors import UsageError
from ssdctl.runtime import plugins
from ssdctl.runtime.hardware import bind_to_card, cores_kept, find_hardware
from ssdctl.runtime.plugins import DEVICES, Plugin, guarded

if TYPE_CHECKING:
    from ssdctl.config.fields import DeviceType
    from ssdctl.distributed import Ranks

Module = TypeVar("Module", bound=nn.Module)
ParameterGroups = list[dict[str, Any]]
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Decoder(NamedTuple):
    """A decoder of images on the device itself, for a library."""

    ordinal: int  # index among the devices of this type
    # Return a uint8 tensor of a shape, filled by `fill(tensor, stream)` on the stream, as a copy.
    receive: Callable[[tuple[int, ...], Callable[[Tensor, Any], object]], Tensor]


class Device(ABC):
    """An open device of this process.

    Defaults of values and methods are for devices without the feature.
    """

    name: str  # as in --device
    label: str  # the model of the card or processor, for messages
    torch_device: torch.device
    backend: str  # torch.distributed's name for it
    auto_precision: str  # the fastest precision that trains well on this hardware
    execution: str  # eager, compile or lazy: how a step runs
    notices: tuple[str, ...] = ()  # messages for the user, such as the reason for another execution
    num_cores: int = 1  # cores that share every batch; batch sizes are multiples of it
    is_host: bool = False  # it computes on tensors of the host: nothing is copied
    bounds_queue: bool = False  # `wait_for_copies` keeps the host at most a few steps ahead
    # Bucket size of DistributedDataParallel; None: `sum_over_ranks` after the backward pass.
    ddp_bucket_mb: int | None
    has_sync_bn: bool = False  # PyTorch's SyncBatchNorm supports it, in eager steps
    # Its optimizers are fused: they read `found_inf` on the device and skip the step.
    supports_found_inf: bool = False
    decoder: Decoder | None = None  # for nvidia-dali; None: it decodes on the host
    # Lower-case parts of error messages that mean that the device's memory is full.
    memory_errors: tuple[str, ...]

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it supports."""
        from ssdctl.config.fields import device_type  # late: a step reads no config

        return device_type(self.name).precisions

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of `model/fused.py` in which its steps compute."""
        return ()

    def place(self, model: Module) -> Module:
        """Move a network to the device, in the device's fastest memory layout."""
        return model.to(self.torch_device)

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the network runs in that precision."""
        dtype = AUTOCAST_DTYPES.get(precision)
        return torch.autocast(self.torch_device.type, dtype, enabled=dtype is not None)

    @functools.cached_property
    def blocks(self) -> contextlib.ExitStack:
        """Blocks with more settings, which end where `opened_device` closes the device."""
        return contextlib.ExitStack()

    def settings(self, *, tf32: bool) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the process's settings are those for this device's kernels.

        Args:
            tf32: Round the factors of fp32 products to TF32, if the hardware can.
        """
        return contextlib.nullcontext()

    def compile(self, module: nn.Module, *, overlap: bool = False) -> None:
        """Compile a module's calls in place if `execution` is compile; else do nothing.

        Args:
            module: A pure function of tensors.
            overlap: Exchange gradients during the backward pass, which splits its graph.
        """
        return

    def host_buffer(self, shape: tuple[int, ...]) -> Tensor:
        """Return uninitialized uint8 host memory that `copy` reads without a copy on the host."""
        return pageable_buffer(shape)

    @abstractmethod
    def copy(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device without waiting.

        The host tensor may be overwritten immediately; a host buffer, after `wait_for_reads`.
        """

    def wait_for_reads(self) -> None:
        """Wait until the copies so far have read their host buffers."""
        return

    def wait_for_copies(self) -> None:
        """Make later work of the device wait for the copies so far.

        The host continues, unless it is several steps ahead of the device.
        """
        return

    def sgd(self, groups: ParameterGroups, lr: float, momentum: float) -> torch.optim.Optimizer:
        if self.supports_found_inf:
            return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)
        rate = torch.tensor(lr, device=self.torch_device)  # see adamw
        return torch.optim.SGD(groups, lr=rate, momentum=momentum, foreach=False)

    def adamw(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        if self.supports_found_inf:
            return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
        # Step count and rate are tensors on the device: a skipped step can be undone there,
        # including its count, and the rate is an input of a compiled graph, not a constant.
        rate = torch.tensor(lr, device=self.torch_device)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, foreach=False, capturable=True)

    def register_backend(self) -> None:
        """Register `backend` with torch.distributed; the rank variables must be set."""
        return

    def sum_over_ranks(self, tensors: list[Tensor], group: Any = None) -> None:
        """Add up each tensor over the ranks of a process group, in place, without waiting."""
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, group=group)

    def mark_step(self) -> None:
        """Mark the end of a step's graph on a lazy device; else do nothing."""
        return

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    @abstractmethod
    def peak_memory_bytes(self) -> int:
        """Return the peak memory that this process held on the device."""

    @abstractmethod
    def memory_bytes(self) -> int | None:
        """Return the total memory that this process may use; None if it is unknown."""

    def release_memory(self) -> None:
        """Release cached memory and reset the peak."""
        return

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error means that the device's memory is full."""
        message = str(error).lower()
        return isinstance(error, torch.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and any(w in message for w in self.memory_errors)
        )


def open_device(name: str, local_rank: int = 0, execution: str | None = None) -> Device:
    """Open a device by its name; `auto` is the accelerator that this machine has, else the CPU.

    Args:
        execution: How steps run (eager, compile, lazy); None is the device's default.

    Raises:
        UsageError: The device or its package is absent, or does not support that execution.
    """
    if name == "auto":
        name = _find_accelerator()
    bind_to_card(name, local_rank)
    module, plugin = plugins.load(DEVICES, name)
    if plugin is None:
        device: Device = module.open_device(local_rank, execution)
        return device
    from ssdctl.config.fields import device_type

    kind = device_type(name)
    with plugin.errors("open_device()"):
        device = module.open_device(local_rank, kind.choose_execution(execution))
        _check(device, kind, plugin)
        plugins.guard_instance(device, type(device), guarded(type(device), plugin, RETURNS))
    return device


@contextlib.contextmanager
def opened_device(
    name: str, ranks: Ranks, execution: str | None = None, *, tf32: bool = False
) -> Iterator[Device]:
    """Open a device for a block, with its settings; after it those and the cores are as before."""
    with cores_kept():
        device = open_device(name, ranks.local_rank, execution)
        with device.settings(tf32=tf32), device.blocks:
            yield device


# What the methods of a device return; those of `autocast` are called in compiled code.
RETURNS: dict[str, type | UnionType] = {
    "place": nn.Module,
    "settings": contextlib.AbstractContextManager,
    "compile": object,
    "host_buffer": Tensor,
    "copy": Tensor,
    "wait_for_reads": object,
    "wait_for_copies": object,
    "sgd": torch.optim.Optimizer,
    "adamw": torch.optim.Optimizer,
    "register_backend": object,
    "sum_over_ranks": object,
    "mark_step": object,
    "synchronize": object,
    "peak_memory_bytes": int,
    "memory_bytes": int | None,
    "release_memory": object,
    "is_out_of_memory": bool,
}


def _check(device: object, kind: DeviceType, plugin: Plugin) -> None:
    plugin.require(isinstance(device, Device), "open_device() to return a Device")
    assert isinstance(device, Device)
    for name, expected in (
        ("label", str), ("torch_device", torch.device), ("backend", str), ("auto_precision", str),
        ("execution", str), ("ddp_bucket_mb", int | None), ("memory_errors", tuple),
        ("notices", tuple), ("forms", tuple),
    ):  # fmt: skip
        is_right = isinstance(getattr(device, name, ...), expected)
        plugin.require(is_right, f"the attribute {name} of its Device, {expected}")
    plugin.require(device.name == kind.name, f"name = {kind.name!r}")
    plugin.require(device.execution in kind.executions, f"an execution of {kind.executions}")
    plugin.require(device.auto_precision in kind.precisions, f"a precision of {kind.precisions}")
    context = device.autocast("fp32")
    is_context = isinstance(context, contextlib.AbstractContextManager)
    plugin.require(is_context, "autocast() to return a context manager")


def _find_accelerator() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("habana_frameworks") is not None:
        return "hpu"
    has_torch_tpu = importlib.util.find_spec("torch_tpu") is not None
    return "tpu" if has_torch_tpu and any(chip.counts for chip in find_hardware().tpus) else "cpu"


def require_package(device: str, package: str, hint: str) -> None:
    """Raise UsageError if the package that registers a device is absent."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"device {device}: the package {package} is not installed here", hint=hint)


@contextlib.contextmanager
def refused_device(device: str, hint: str) -> Iterator[None]:
    """Convert a vendor's error while a device is opened to a UsageError with its first line."""
    try:
        yield
    except (RuntimeError, ImportError) as error:
        raise UsageError(f"device {device}: {str(error).splitlines()[0]}", hint=hint) from error


def pageable_buffer(shape: tuple[int, ...]) -> Tensor:
    """Return a host buffer for devices that do not read pinned memory."""
    return torch.empty(shape, dtype=torch.uint8)
