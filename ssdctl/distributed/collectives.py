"""Exchange values between the ranks of a run. Outside of `process_group` torch's group is used."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ssdctl.device import Device
from ssdctl.distributed import Ranks
from ssdctl.distributed.process_group import joined_ranks, of_all_ranks, pause
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.runtime.packages import no_buffer_sync

if TYPE_CHECKING:
    from ssdctl.config import PrepareConfig
    from ssdctl.data.store import Split
    from ssdctl.runtime.progress import Progress

T = TypeVar("T")


def main_first(on_main: Callable[[], T], on_others: Callable[[], T], ranks: Ranks) -> T:
    """Return `on_main()` of the first rank, and then `on_others()` of each other rank.

    The others wait without a time limit, which signals and the failure of a rank interrupt. For
    work that one rank does for all, such as preparing a dataset.
    """
    if ranks.is_single_process:
        return on_main()
    joined = joined_ranks(ranks)
    key = f"task/{next(joined.tasks)}"
    if ranks.is_main:
        result = on_main()
        joined.store.set(key, "yes")
        return result
    while not joined.store.check([key]):
        if (failure := joined.failure()) is not None:
            raise failure
        pause(ranks.world_size)
    return on_others()


def open_on_all_ranks(
    root: Path, folder: Path, options: PrepareConfig, ranks: Ranks, progress: Progress
) -> dict[str, Split]:
    """Return the splits as `open_dataset`; the other ranks wait while the first one prepares."""
    from ssdctl.data.open_dataset import open_dataset  # late: a run without ranks needs neither
    from ssdctl.data.store import open_splits

    return main_first(
        lambda: open_dataset(root, folder, options, progress=progress),
        lambda: open_splits(root, folder),
        ranks,
    )


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
    joined = joined_ranks(ranks)
    wrapped = _Wrapped(model, process_group=joined.device_group, **options)
    joined.release_on_leave(wrapped)
    return wrapped


class _Wrapped(nn.parallel.DistributedDataParallel):
    def release(self) -> None:
        vars(self).update(process_group=None, reducer=None, logger=None)


def any_rank(flags: Sequence[bool], ranks: Ranks) -> list[bool]:
    """Return for each flag whether any rank raised it. Does not wait for the device."""
    return FlagExchange(ranks).settle(flags)


class FlagExchange:
    """Exchange flags between the ranks in the background, so that no step waits for other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = joined_ranks(ranks)
        self._pending: tuple[Tensor, Any] | None = None  # the flags of all ranks, and their work
        if not ranks.is_single_process:
            self._ranks.release_on_leave(self)

    def release(self) -> None:
        """Let go of the group; an exchange that was started is forgotten."""
        self._pending = None

    def exchange(self, flags: Sequence[bool]) -> list[bool]:
        """Start to exchange flags; return whether any rank raised them at the previous call.

        Collective: every rank must make the same number of calls. A single process gets its
        own flags at once.
        """
        if self._ranks.is_single_process:
            return list(flags)
        previous = self._finish(len(flags))
        raised = torch.tensor([int(flag) for flag in flags])
        group: Any = self._ranks.host_group or dist.group.WORLD
        self._pending = raised, group.allreduce([raised], dist.ReduceOp.MAX)
        return previous

    def settle(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether any rank raised the flags, now or at the previous call; waits for all."""
        previous = self.exchange(flags)
        if self._ranks.is_single_process:
            return previous
        return [a or b for a, b in zip(previous, self._finish(len(flags)), strict=True)]

    def _finish(self, count: int) -> list[bool]:
        """Return the result of the last exchange, which has usually arrived."""
        if self._pending is None:
            return [False] * count
        (raised, work), self._pending = self._pending, None
        work.wait()
        return [bool(flag) for flag in raised.tolist()]


def device_group(ranks: Ranks) -> Any:
    """Return the group for tensors of the device; None is torch's default group."""
    return joined_ranks(ranks).device_group


def average(tensor: Tensor, ranks: Ranks) -> Tensor:
    if ranks.is_single_process:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total, group=device_group(ranks))
    return total / ranks.world_size


def average_buffers(buffers: Iterable[Tensor], ranks: Ranks) -> None:
    """Average batch norm's running statistics, which each rank computes from its own images."""
    floats = [buffer for buffer in buffers if buffer.is_floating_point()]
    if ranks.is_single_process or not floats:
        return
    flat = torch.cat([buffer.reshape(-1) for buffer in floats])
    dist.all_reduce(flat, group=device_group(ranks))
    flat /= ranks.world_size
    for buffer, mean in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def barrier(ranks: Ranks) -> None:
    any_rank([False], ranks)


def broadcast(value: T, ranks: Ranks) -> T:
    if ranks.is_single_process:
        return value
    values = [value]
    dist.broadcast_object_list(values, group=joined_ranks(ranks).host_group)
    return values[0]


def from_first(work: Callable[[], T], ranks: Ranks) -> T:
    """Return on all ranks what `work` returns on the first one, the only one that calls it."""
    return broadcast(cast("T", work() if ranks.is_main else None), ranks)


def require_same(facts: Mapping[str, object], ranks: Ranks) -> None:
    """Check facts on which the collectives depend; gloo ends processes that exchange unlike ones.

    Raises:
        UsageError: They differ from the first rank's; raised on a rank where they do.
    """
    first = broadcast(facts, ranks)
    texts = [f"{name} is {facts[name]}, there {first[name]}" for name in facts]
    texts = [text for text, name in zip(texts, facts, strict=True) if facts[name] != first[name]]
    if texts:
        raise UsageError(
            f"rank {ranks.rank} has other data or settings than rank 0: {'; '.join(texts)}",
            hint="give every rank the same dataset and settings",
        )


def gather_to_first(value: T, ranks: Ranks) -> list[T]:
    """Return every rank's value, ordered by rank, on the first rank; an empty list elsewhere."""
    if ranks.is_single_process:
        return [value]
    values: list[Any] = [None] * ranks.world_size
    group = joined_ranks(ranks).host_group
    dist.gather_object(value, values if ranks.is_main else None, group=group)
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
        error.host, result = socket.gethostname(), error
    results = gather_to_first(result, ranks)
    failure = broadcast(next((r for r in results if isinstance(r, SsdctlError)), None), ranks)
    if failure is not None:
        raise of_all_ranks(failure)
    return [r for r in results if not isinstance(r, SsdctlError)]
