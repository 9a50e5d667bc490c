"""Join the ranks of a run, and exchange values between them; report which ranks were lost.

Tensors on the device are reduced by the device's own backend. Flags and objects of the hosts are
exchanged over gloo, so that no rank waits for its device only to agree with the others.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ssdctl.device import Device
from ssdctl.distributed import Ranks, interface_for_peers
from ssdctl.errors import DistributedError, SsdctlError, Stopped, UsageError
from ssdctl.runtime import signals
from ssdctl.runtime.packages import no_buffer_sync
from ssdctl.runtime.system import run_in_daemon_thread, with_defaults

if TYPE_CHECKING:
    from ssdctl.data.store import Split
    from ssdctl.runtime.progress import Progress

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 600.0
MIN_TIMEOUT_S = 300.0  # ranks may still import, or wait for a node
MISSING_RANKS_WAIT_S = 5.0  # after a lost rank, how long to wait for reports of the others
POLL_S = 0.05
FREE_TENSORS_S = 0.2  # gloo's threads need microseconds
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, left out of __all__
ARRIVED = "arrived"  # the store's key that counts the ranks
RANKS_PER_POLL = 64  # more ranks poll less often, because a single process answers all of them
GRACE_S = 1.0
# Torchrun's store outlives a group, so the next group of the processes needs other keys.
_groups = itertools.count()
_tasks = itertools.count()  # those of a group that its first rank does for all
LOST = (  # parts of backends' error messages
    *("connection closed", "connection reset", "timed out", "gloo", "nccl", "hccl", "peer"),
    "pair closure",  # gloo, when an all-reduce of a backward pass ends
)
# The gloo group of the hosts, and the key-value store of all ranks, while the ranks are joined.
_group: Any = None
_store: Any = None


def host_group() -> Any:
    """Return the group for flags and objects of the hosts; None is torch's default group."""
    return _group


@contextlib.contextmanager
def process_group(
    ranks: Ranks, device: Device, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Join the other ranks for the block; a process group that the caller has made is kept.

    Args:
        timeout_s: How long a rank waits for another before that one counts as lost.

    Raises:
        DistributedError: A rank died, hung or could not be reached; the message names it.
    """
    global _group, _store, _tasks
    if ranks.is_single_process:
        yield
        return
    _tasks = itertools.count()
    is_ours, variables = not dist.is_initialized(), contextlib.ExitStack()
    try:
        timeout = datetime.timedelta(seconds=timeout_s)
        with _stdout_to_stderr():
            if is_ours:
                variables.enter_context(with_defaults(_variables(ranks)))
                _join(ranks, device, timeout)
            else:
                _use_joined(timeout)
        yield
    except RuntimeError as error:  # dist.DistError is one
        if not isinstance(error, dist.DistError) and not any(w in str(error).lower() for w in LOST):
            raise
        raise _lost_rank(ranks, error, timeout_s) from error
    finally:
        group, _group, _store = _group, None, None
        if dist.is_initialized() and (is_ours or group is not None):
            # Destroying a group waits for gloo's threads and holds the interpreter's lock, which
            # they need to free the tensors of the last operation: a deadlock with torch up to 2.7
            # (pytorch/pytorch#154976).
            time.sleep(FREE_TENSORS_S)
            with contextlib.suppress(RuntimeError):  # the other ranks may be gone
                dist.destroy_process_group(None if is_ours else group)
        variables.close()


def _lost_rank(ranks: Ranks, error: RuntimeError, timeout_s: float) -> DistributedError:
    # The message without its source location and advice for programmers.
    line = re.sub(r"^\[\S+:\d+\] *", "", str(error).splitlines()[0])
    return DistributedError(
        f"rank {ranks.rank} lost {_missing_ranks(ranks)}: "
        f"{line.partition('. This is typically')[0]}",
        hint="the first failure is in the log of the rank that was lost; --rank-timeout sets "
        f"how long a rank is waited for (now {timeout_s:g} s)",
    )


def main_first(on_main: Callable[[], T], on_others: Callable[[], T], ranks: Ranks) -> T:
    """Return `on_main()` of the first rank, and then `on_others()` of each other rank.

    The others wait without a time limit, which signals interrupt. For work that one rank does for
    all, such as preparing a dataset.

    Raises:
        SsdctlError: The error of the first rank, on every rank. Its `is_from_all_ranks` is set.
        DistributedError: The first rank failed with another exception; raised on the others.
    """
    if ranks.is_single_process:
        return on_main()
    key = f"task/{next(_tasks)}"
    if ranks.is_main:
        failure: SsdctlError | None = DistributedError("rank 0 failed; its log says why")
        try:
            result, failure = on_main(), None
        except SsdctlError as error:
            error.is_from_all_ranks, failure = True, error
            raise
        finally:
            _store.set(key, pickle.dumps(failure))
        return result
    while not _store.check([key]):
        time.sleep(POLL_S)
    if (failure := pickle.loads(_store.get(key))) is not None:
        raise failure
    return on_others()


def open_on_all_ranks(
    root: Path, folder: Path, ranks: Ranks, progress: Progress
) -> dict[str, Split]:
    """Return the splits; the other ranks wait for the first one however long it prepares."""
    from ssdctl.data.open_dataset import open_dataset  # late: a run without ranks needs neither
    from ssdctl.data.store import open_splits

    return main_first(
        lambda: open_dataset(root, folder, progress=progress),
        lambda: open_splits(root, folder),
        ranks,
    )


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout of C++: some versions of gloo print connections there."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _variables(ranks: Ranks) -> dict[str, str]:
    """Return the variables that torch and vendors' backends read, under srun too."""
    if "MASTER_PORT" not in os.environ:
        raise UsageError("MASTER_PORT is not set", hint="start the ranks with ssdctl launch")
    leader = os.environ.get("MASTER_ADDR", "127.0.0.1")
    numbers = zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), map(str, ranks), strict=True)
    interface = interface_for_peers(leader, ranks.world_size)
    gloo = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    return {"MASTER_ADDR": leader, **dict(numbers), **gloo}


def _join(ranks: Ranks, device: Device, timeout: datetime.timedelta) -> None:
    global _group, _store
    device.register_backend()
    store = _rendezvous(ranks, timeout.total_seconds())
    # The hosts must detect a hanging rank before the device's own backend does, which may abort.
    dist.init_process_group(
        device.backend,
        store=_PrefixStore("device", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout if device.backend == "gloo" else 2 * timeout,
    )
    if device.backend != "gloo":
        _group = dist.new_group(backend="gloo", timeout=timeout)
    _store = _PrefixStore("ssdctl", store)


def _use_joined(timeout: datetime.timedelta) -> None:
    """Exchange values of the hosts in a process group that the caller has made."""
    global _group, _store
    if dist.get_backend() != "gloo":
        _group = dist.new_group(backend="gloo", timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    number = [next(_groups)]  # the first rank's: a rank may have failed in an earlier call
    dist.broadcast_object_list(number, group=_group)
    _store = _PrefixStore(f"ssdctl-{number[0]}", store)


def _missing_ranks(ranks: Ranks) -> str:
    """Return the ranks that did not check in within some seconds, for a message."""
    if _store is None:
        return "the other ranks before all had joined"
    try:
        _store.set(f"here/{ranks.rank}", "yes")
        deadline = time.monotonic() + MISSING_RANKS_WAIT_S
        others = set(range(ranks.world_size)) - {ranks.rank}
        while others and time.monotonic() < deadline:
            others -= {rank for rank in others if _store.check([f"here/{rank}"])}
            time.sleep(0.1)
    except RuntimeError:  # rank 0 serves the store
        return "rank 0, or its machine"
    return f"rank {', '.join(map(str, sorted(others)))}" if others else "another rank for some time"


def _rendezvous(ranks: Ranks, timeout_s: float) -> Any:
    """Return the key-value store of all ranks once all have arrived."""
    with signals.ending_at_once():  # a signal interrupts the wait for a thread, not torch's own
        met = run_in_daemon_thread(
            lambda: next(torch_rendezvous("env://", ranks.rank, ranks.world_size))
        )
        store = _PrefixStore(f"group-{next(_groups)}", met.result()[0])
    store.add(ARRIVED, 1)
    try:
        with signals.ending_at_once():
            _wait_for_all(store, ranks.world_size, max(timeout_s, MIN_TIMEOUT_S))
    except Stopped:
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            if store.add(ARRIVED, 0) >= ranks.world_size:
                return store  # all had arrived, some may have continued: stop where they stop
            store.add(ARRIVED, -1)
        raise
    return store


def _wait_for_all(store: Any, world_size: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    try:
        while (arrived := store.add(ARRIVED, 0)) < world_size:
            if time.monotonic() > deadline:
                raise RuntimeError(f"timed out: only {arrived} of {world_size} ranks have joined")
            time.sleep(POLL_S * max(1.0, world_size / RANKS_PER_POLL))
    except RuntimeError:  # rank 0 is gone; its signal may be about to arrive here
        time.sleep(GRACE_S)
        raise


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
        """Return the result of the last exchange, which has usually arrived."""
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
