"""The protocol that every device implements; the other packages use devices only through it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ssdctl.errors import UsageError

Module = TypeVar("Module", bound=nn.Module)
ParameterGroups = list[dict[str, Any]]


class Decoder(NamedTuple):
    """Where a library may decode images on the device itself."""

    ordinal: int  # of the device among its like
    # A uint8 tensor of that shape, which `fill(tensor, stream)` fills on that stream, as a copy.
    receive: Callable[[tuple[int, ...], Callable[[Tensor, Any], object]], Tensor]


class Device(Protocol):
    """An open device of this process."""

    name: str  # as in --device
    label: str  # for people: the model of the card or processor
    torch_device: torch.device
    backend: str  # of torch.distributed
    has_native_bf16: bool
    precisions: tuple[str, ...]  # that it can compute in
    auto_precision: str  # the fastest of them that trains well on this hardware
    execution: str  # eager, compile or lazy: how a step runs
    notices: tuple[
        str, ...
    ]  # what the user should know, such as why something asked for is not used
    is_host: bool  # tensors of the host are its own: nothing is copied
    averages_in_backward: bool  # DistributedDataParallel works here
    has_sync_bn: bool  # SyncBatchNorm works here
    supports_found_inf: bool  # its optimizers read `found_inf` on the device and stay put
    decoder: Decoder | None  # where nvidia-dali decodes; None: on the host

    def place(self, model: Module) -> Module:
        """Move a network here, in the memory layout that is fastest here."""
        ...

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which the network runs in that precision."""
        ...

    def set_tf32(self, wanted: bool) -> None:
        """Let fp32 products round their factors to TF32, where the hardware can; or not."""
        ...

    def compile(self, module: nn.Module) -> None:
        """Have a module's calls compiled, in place; nothing unless `execution` is compile."""
        ...

    def copy(self, tensor: Tensor) -> Tensor:
        """A copy here of a tensor of the host, which may be overwritten at once. Never waits."""
        ...

    def wait_for_copies(self) -> None:
        """Have what the device does next wait for the copies so far.

        The host goes on, unless it is several steps ahead of the device.
        """
        ...

    def sgd(self, groups: ParameterGroups, lr: float, momentum: float) -> torch.optim.Optimizer:
        """The fastest SGD here."""
        ...

    def adamw(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        """The fastest AdamW here."""
        ...

    def register_backend(self) -> None:
        """Make `backend` known to torch.distributed, once the rank variables are set."""
        ...

    def mark_step(self) -> None:
        """Tell a lazy device that a step's graph is complete; nothing elsewhere."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""
        ...

    def peak_memory_bytes(self) -> int:
        """The most memory that this process held on the device so far."""
        ...

    def memory_bytes(self) -> int | None:
        """The memory that this process may fill in all; None where that cannot be asked."""
        ...

    def release_memory(self) -> None:
        """Release cached memory and reset the peak."""
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device's memory is full."""
        ...

    def counters(self) -> dict[str, int]:
        """Of a lazy device: graphs compiled (`compiles`) and values fetched (`pulls`) so far."""
        ...


def channels_last(model: Module) -> Module:
    """Convolutions are fastest so, except where a compiler lays memory out itself."""
    return model.to(memory_format=torch.channels_last)


def choose_execution(device: str, wanted: str | None, offered: tuple[str, ...]) -> str:
    """Return how steps run: the wanted way, else the first that the device offers.

    Raises:
        UsageError: The device does not offer it.
    """
    if wanted is None:
        return offered[0]
    if wanted not in offered:
        raise UsageError(
            f"device {device} has no {wanted} execution",
            hint=f"--execution {' or '.join(offered)}",
        )
    return wanted


def compile_cache(name: str, local_rank: int = 0) -> Path:
    """Where compiled graphs are kept, so that a resumed run need not compile them again."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "ssdctl" / f"{name}-{local_rank}"


def fused_sgd(groups: ParameterGroups, lr: float, momentum: float) -> torch.optim.Optimizer:
    """PyTorch's SGD as one kernel."""
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=True)


def fused_adamw(
    groups: ParameterGroups, lr: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """PyTorch's AdamW as one kernel."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def capturable_adamw(
    groups: ParameterGroups, lr: float, betas: tuple[float, float], device: torch.device
) -> torch.optim.Optimizer:
    """Return PyTorch's AdamW with its step count and rate as tensors on the device.

    A step that is left out can then be undone there, its count included, and a rate that is a
    tensor is an input of a compiled graph, whatever its value.
    """
    rate = torch.tensor(lr, device=device)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, foreach=False, capturable=True)
