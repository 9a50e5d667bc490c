"""What every device offers. The rest of the house knows devices by this protocol alone."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def channels_last(model: Module) -> Module:
    """Convolutions are fastest with the channels innermost, on every device so far."""
    return model.to(memory_format=torch.channels_last)


class Device(Protocol):
    """An open device of this process."""

    name: str  # as in --device
    label: str  # for people: the model of the card or processor
    torch_device: torch.device
    backend: str  # of torch.distributed
    has_native_bf16: bool
    precisions: tuple[str, ...]  # that it can compute in

    def place(self, model: Module) -> Module:
        """Move a network here, in the memory layout that is fastest here."""
        ...

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """The context in which the network runs in that precision."""
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
