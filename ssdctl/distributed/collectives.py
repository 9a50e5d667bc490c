"""Collective operations of the ranks: average, agree, gather, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ssdctl.device import Device
from ssdctl.distributed.process_group import host_group
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import SsdctlError
from ssdctl.runtime.torch_compat import no_buffer_sync

T = TypeVar("T")


def wrap(model: nn.Module, ranks: Ranks, device: Device) -> nn.Module:
    """Return the network with its gradients averaged over the ranks."""
    if ranks.is_single_process or device.ddp_bucket_mb is None:
        return model
    options: dict[str, Any] = {
        "device_ids": None if device.torch_device.index is None else [device.torch_device],
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": device.ddp_bucket_mb,
        # Batch norm's statistics are averaged before they are used, not copied at every step.
        **no_buffer_sync(nn.parallel.DistributedDataParallel),
    }
    return nn.parallel.DistributedDataParallel(model, **options)


def any_rank(flags: Sequence[bool], ranks: Ranks) -> list[bool]:
    """Return for each flag whether any rank raised it. Does not wait for the device."""
    return FlagExchange(ranks).settle(flags)


class FlagExchange:
    """Exchange flags between the ranks in the background, so that no step waits for other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: tuple[Tensor, Any] | None = None  # the flags of all ranks, and their work

    def exchange(self, flags: Sequence[bool]) -> list[bool]:
        """Start to exchange flags; return whether any rank raised them at the previous call.

        Collective: every rank must make the same number of calls. A single process gets its
        own flags at once.
        """
        if self._ranks.is_single_process:
            return list(flags)
        previous = self._finish(len(flags))
        raised = torch.tensor([int(flag) for flag in flags])
        group: Any = host_group() or dist.group.WORLD
        self._pending = raised, group.allreduce([raised], dist.ReduceOp.MAX)
        return previous

    def settle(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether any rank raised the flags, now or at the previous call; waits for all."""
        previous = self.exchange(flags)
        if self._ranks.is_single_process:
            return previous
        return [a or b for a, b in zip(previous, self._finish(len(flags)), strict=True)]

    def _finish(self, count: int) -> list[bool]:
        """Return the result of the exchange that was started last; usually it is finished."""
        if self._pending is None:
            return [False] * count
        (raised, work), self._pending = self._pending, None
        work.wait()
        return [bool(flag) for flag in raised.tolist()]


def average(tensor: Tensor, ranks: Ranks) -> Tensor:
    if ranks.is_single_process:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / ranks.world_size


def average_buffers(buffers: Iterable[Tensor], ranks: Ranks) -> None:
    """Average batch norm's running statistics, which each rank computes from its own images."""
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    if ranks.is_single_process or not floats:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in floats])
    dist.all_reduce(flat)
    flat /= ranks.world_size
    for buffer, mean in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def barrier(ranks: Ranks) -> None:
    any_rank([False], ranks)


def broadcast(value: T, ranks: Ranks) -> T:
    if ranks.is_single_process:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=host_group())
    return values[0]


def gather_to_first(value: T, ranks: Ranks) -> list[T]:
    """Return every rank's value, ordered by rank, on the first rank; an empty list elsewhere."""
    if ranks.is_single_process:
        return [value]
    values: list[Any] = [None] * ranks.world_size
    dist.gather_object(value, values if ranks.is_main else None, group=host_group())
    return values if ranks.is_main else []


def run_and_gather(work: Callable[[], T], ranks: Ranks) -> list[T]:
    """Run `work` on every rank and return all results on the first rank; an empty list elsewhere.

    Raises:
        SsdctlError: The error of the first rank that failed, on every rank, so that none waits
            for the failed one. Its `is_from_all_ranks` is set.
    """
    result: T | SsdctlError
    try:
        result = work()
    except SsdctlError as error:
        result = error
    results = gather_to_first(result, ranks)
    failure = broadcast(next((r for r in results if isinstance(r, SsdctlError)), None), ranks)
    if failure is not None:
        failure.is_from_all_ranks = True
        raise failure
    return [r for r in results if not isinstance(r, SsdctlError)]
