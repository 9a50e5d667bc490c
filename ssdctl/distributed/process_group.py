"""Join the ranks of a run in process groups; report which ranks were lost.

Tensors on the device are reduced by the device's own backend. Flags and objects of the hosts are
exchanged over gloo, so that no rank waits for its device only to agree with the others.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import os
import pickle
import re
import socket
import time
import weakref
from collections.abc import Iterator
from typing import Any

from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ssdctl.device import Device
from ssdctl.distributed import Ranks, find_ranks, interface_for_peers, require_port
from ssdctl.errors import DistributedError, SsdctlError, Stopped
from ssdctl.files import own_refusal_of_disk
from ssdctl.runtime import signals
from ssdctl.runtime.system import run_in_daemon_thread, stdout_to_stderr, with_defaults

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
_users: list[Ranks] = []  # those in a process group that is not the caller's
LOST = (  # parts of backends' error messages
    *("connection closed", "connection reset", "timed out", "gloo", "nccl", "hccl", "peer"),
    "pair closure",  # gloo, when an all-reduce of a backward pass ends
)
FAILURES, FIRST_FAILURE = "failures", "failure"  # the store's keys: their number; the error
INFORMED = "informed"  # the store's key that counts the ranks that know of a failure
INFORM_S = 5.0  # how long the first rank, which may serve the store, waits for them


class JoinedRanks(Ranks):
    """The ranks of one call, with groups and a store of their own while `process_group` lasts."""

    host_group: Any = None  # for flags and objects; None is torch's default group
    device_group: Any = None  # for tensors of the device
    store: Any = None
    has_failed = False  # whether this rank knows of a failure

    @functools.cached_property
    def tasks(self) -> Iterator[int]:
        """Number the tasks that the first rank does for all."""
        return itertools.count()

    @functools.cached_property
    def _holders(self) -> weakref.WeakSet[Any]:
        return weakref.WeakSet()

    def join(self, device: Device | None, timeout: datetime.timedelta) -> None:
        """Make the process group, or groups within the one that the caller has made."""
        is_first, self._variables = not dist.is_initialized(), contextlib.ExitStack()
        if is_first or _users:  # of a group that is ours
            _users.append(self)
        if is_first:
            assert device is not None
            self._variables.enter_context(with_defaults(_variables(self)))
            _join(self, device, timeout)
        else:
            _use_joined(self, timeout)

    def release_on_leave(self, holder: Any) -> None:
        """Register an object whose `release` lets go of the group."""
        self._holders.add(holder)

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves, unless another one failed before."""
        if (refusal := own_refusal_of_disk(error)) is not None:
            error = refusal
        elif not isinstance(error, SsdctlError):
            text = f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0]
            hint = "its log or traceback says where"
            error = DistributedError(f"rank {self.rank} failed: {text}", hint=hint)
        self.has_failed, error.host = True, socket.gethostname()
        with contextlib.suppress(RuntimeError):  # the first rank is gone
            if self.store.add(FAILURES, 1) == 1:
                self.store.set(FIRST_FAILURE, pickle.dumps(error))

    def failure(self) -> SsdctlError | None:
        """Return the error of the rank that failed first; its `is_from_all_ranks` is set."""
        if not self.store.check([FIRST_FAILURE]):
            return None
        error: SsdctlError = pickle.loads(self.store.get(FIRST_FAILURE))
        self.has_failed = True
        return of_all_ranks(error)

    def leave(self) -> None:
        """Destroy the groups: ranks that wait for this one get an error at once.

        The connections close with the last reference. After a failure, the first rank waits until
        the others know of it, or some seconds.
        """
        store = self.store
        for holder in list(self._holders):
            holder.release()
        groups = [] if self.host_group is None else [self.host_group]
        self.host_group = self.device_group = self.store = None
        if self in _users:
            _users.remove(self)
            groups = groups if _users else [None]  # all
        for group in groups if dist.is_initialized() else ():
            # Destroying a group waits for gloo's threads and holds the interpreter's lock, which
            # they need to free the tensors of the last operation: a deadlock with torch up to 2.7
            # (pytorch/pytorch#154976).
            time.sleep(FREE_TENSORS_S)
            with contextlib.suppress(RuntimeError):  # the other ranks may be gone
                dist.destroy_process_group(group)
        if self.has_failed:
            with contextlib.suppress(RuntimeError):  # the first rank is gone
                store.add(INFORMED, 1)
                end = time.monotonic() + INFORM_S * self.is_main
                while store.add(INFORMED, 0) < self.world_size and time.monotonic() < end:
                    pause(self.world_size)
        self._variables.close()


def joined_ranks(ranks: Ranks) -> JoinedRanks:
    """Return the groups of the ranks; torch's default one outside of `process_group`."""
    return ranks if isinstance(ranks, JoinedRanks) else JoinedRanks(*ranks)


def of_all_ranks(error: SsdctlError) -> SsdctlError:
    """Return the error of one rank as each rank raises it, with the host if that is another."""
    error.is_from_all_ranks = True
    if error.host not in (None, socket.gethostname()):
        error.begin_with(f"host {error.host}")
    return error


@contextlib.contextmanager
def process_group(
    ranks: Ranks, device: Device | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[Ranks]:
    """Join the other ranks for the block, also in a process group that the caller has made.

    An error that leaves the block on one rank ends it on all.

    Args:
        device: Chooses the backend; not needed in a group of the caller.
        timeout_s: How long a rank waits for another before that one counts as lost.

    Yields:
        The ranks, for the functions of this module.

    Raises:
        SsdctlError: The error of the rank that failed first. Its `is_from_all_ranks` is set.
        DistributedError: A rank failed with another exception, died, hung, left or could not be
            reached; the message names it.
    """
    if ranks.is_single_process:
        yield ranks
        return
    joined = JoinedRanks(*ranks)
    try:
        with stdout_to_stderr():
            joined.join(device, datetime.timedelta(seconds=timeout_s))
        yield joined
    except GeneratorExit:
        raise
    except BaseException as error:
        if _is_lost_rank(error):
            raise _lost_rank(joined, error, timeout_s) from error
        if joined.store is not None:
            joined.publish(error)
        raise
    finally:
        joined.leave()


@contextlib.contextmanager
def failing_together(is_distributed: bool = True) -> Iterator[None]:
    """Raise an error of the block on all ranks of the caller's process group.

    For the part of a call before `process_group`, where the other ranks may wait already.
    """
    try:
        yield
    except Exception as error:
        if is_distributed and dist.is_initialized():
            with contextlib.suppress(SsdctlError), process_group(find_ranks()):
                raise error
        raise


def _is_lost_rank(error: BaseException) -> bool:
    is_lost = any(word in str(error).lower() for word in LOST)
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or is_lost)


def _lost_rank(ranks: JoinedRanks, error: BaseException, timeout_s: float) -> SsdctlError:
    with contextlib.suppress(RuntimeError):  # the first rank serves the store
        if ranks.store is not None and (failure := ranks.failure()) is not None:
            return failure
    # The message without its source location and advice for programmers.
    line = re.sub(r"^\[\S+:\d+\] *", "", str(error).splitlines()[0])
    return DistributedError(
        f"rank {ranks.rank} lost {_missing_ranks(ranks)}: "
        f"{line.partition('. This is typically')[0]}",
        hint="the first failure is in the log of the rank that was lost; --rank-timeout sets "
        f"how long a rank is waited for (now {timeout_s:g} s)",
    )


def _variables(ranks: Ranks) -> dict[str, str]:
    """Return the variables that torch and vendors' backends read, under srun too."""
    require_port()
    leader = os.environ.get("MASTER_ADDR", "127.0.0.1")
    numbers = zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), map(str, ranks), strict=True)
    interface = interface_for_peers(leader, ranks.world_size)
    gloo = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    return {"MASTER_ADDR": leader, **dict(numbers), **gloo}


def _join(ranks: JoinedRanks, device: Device, timeout: datetime.timedelta) -> None:
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
        ranks.host_group = dist.new_group(backend="gloo", timeout=timeout)
    ranks.store = _PrefixStore("ssdctl", store)


def _use_joined(ranks: JoinedRanks, timeout: datetime.timedelta) -> None:
    """Join in a process group that the caller has made, whose own connections stay open."""
    group: Any = dist.new_group(backend="gloo", timeout=timeout)
    ranks.host_group, ranks.device_group = group, group if dist.get_backend() == "gloo" else None
    store = dist.distributed_c10d._get_default_store()
    number = [next(_groups)]  # the first rank's: a rank may have failed in an earlier call
    dist.broadcast_object_list(number, group=group)
    ranks.store = _PrefixStore(f"ssdctl-{number[0]}", store)


def _missing_ranks(ranks: JoinedRanks) -> str:
    """Return the ranks that did not check in within some seconds, for a message."""
    if ranks.store is None:
        return "the other ranks before all had joined"
    try:
        ranks.store.set(f"here/{ranks.rank}", "yes")
        deadline = time.monotonic() + MISSING_RANKS_WAIT_S
        others = set(range(ranks.world_size)) - {ranks.rank}
        while others and time.monotonic() < deadline:
            others -= {rank for rank in others if ranks.store.check([f"here/{rank}"])}
            time.sleep(0.1)
    except RuntimeError:  # rank 0 serves the store
        return "rank 0, or its machine"
    return f"rank {', '.join(map(str, sorted(others)))}" if others else "another rank for some time"


def _rendezvous(ranks: Ranks, timeout_s: float) -> Any:
    """Return the key-value store of all ranks once all have arrived."""
    timeout_s = max(timeout_s, MIN_TIMEOUT_S)
    limit = datetime.timedelta(seconds=timeout_s)  # of the first rank; torch's own is half an hour
    with signals.ending_at_once():  # a signal interrupts the wait for a thread, not torch's own
        met = run_in_daemon_thread(
            lambda: next(torch_rendezvous("env://", ranks.rank, ranks.world_size, timeout=limit))
        )
        store = _PrefixStore(f"group-{next(_groups)}", met.result()[0])
    store.add(ARRIVED, 1)
    try:
        with signals.ending_at_once():
            _wait_for_all(store, ranks.world_size, timeout_s)
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
            pause(world_size)
    except RuntimeError:  # rank 0 is gone; its signal may be about to arrive here
        time.sleep(GRACE_S)
        raise


def pause(world_size: int) -> None:
    """Wait before the next request to the store, less often if it answers many ranks."""
    time.sleep(POLL_S * max(1.0, world_size / RANKS_PER_POLL))
