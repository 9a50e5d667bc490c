"""What all ranks do together: join, average, agree, gather; and who is missing when one is lost.

Numbers on the device travel over the device's own backend. What the hosts tell each other (stop,
objects) travels over gloo, so that no rank waits for its device just to agree.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ssdctl.device.base import Device
from ssdctl.distributed.addresses import interface_for_peers
from ssdctl.distributed.ranks import Ranks
from ssdctl.distributed.rendezvous import rendezvous
from ssdctl.errors import DistributedError, SsdctlError, UsageError
from ssdctl.evaluate.together import Together
from ssdctl.runtime.torch_compat import no_buffer_sync

DEFAULT_TIMEOUT_S = 600.0
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]  # public, left out of __all__
MISSING_RANKS_WAIT_S = 5.0  # how long a rank that lost another waits for the rest to say the same
T = TypeVar("T")


class _Hosts:
    """How the hosts of a run talk: set while the ranks are joined."""

    group: Any = None
    store: Any = None


@contextlib.contextmanager
def process_group(
    ranks: Ranks, device: Device, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Join the other ranks for the length of the block.

    Args:
        ranks: This process and the others.
        device: Whose backend averages gradients.
        timeout_s: How long a rank waits for another before it gives it up.

    Raises:
        DistributedError: A rank died, hung or could not be reached; the message names it.
    """
    if ranks.is_single_process:
        yield
        return
    try:
        with _stdout_to_stderr():
            _join(ranks, device, datetime.timedelta(seconds=timeout_s))
        yield
    except (dist.DistError, RuntimeError) as error:
        if not _is_from_a_peer(error):
            raise
        raise DistributedError(
            f"rank {ranks.rank} lost {_missing_ranks(ranks)}: {_said(error)}",
            hint="the first failure is in the log of the rank that was lost; --rank-timeout says "
            f"how long a rank is waited for (now {timeout_s:g} s)",
        ) from error
    finally:
        _Hosts.group = _Hosts.store = None
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the peers may be gone
                dist.destroy_process_group()


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Gloo of some versions tells on stdout, from C++, whom it has met; stdout is for results."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _join(ranks: Ranks, device: Device, timeout: datetime.timedelta) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        raise UsageError("MASTER_PORT is not set", hint="start the ranks with ssdctl launch")
    for name, number in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), ranks, strict=True):
        os.environ.setdefault(name, str(number))  # what a vendor's backend reads, under srun too
    interface = interface_for_peers(os.environ["MASTER_ADDR"], ranks.world_size)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    device.register_backend()
    store = rendezvous(ranks, timeout.total_seconds())
    # The hosts notice a rank that hangs before the device's own backend does, which may abort.
    dist.init_process_group(
        device.backend,
        store=_PrefixStore("device", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout if device.backend == "gloo" else 2 * timeout,
    )
    is_host = device.backend == "gloo"
    _Hosts.group = None if is_host else dist.new_group(backend="gloo", timeout=timeout)
    _Hosts.store = _PrefixStore("ssdctl", store)


def _is_from_a_peer(error: Exception) -> bool:
    words = ("connection closed", "connection reset", "timed out", "gloo", "nccl", "hccl", "peer")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)


def _said(error: Exception) -> str:
    """A library's complaint without its place in the source and its advice to programmers."""
    line = re.sub(r"^\[\S+:\d+\] *", "", str(error).splitlines()[0])
    return line.partition(". This is typically")[0]


def _missing_ranks(ranks: Ranks) -> str:
    """Who is lost: those that do not say, within some seconds, that they lost somebody too."""
    if _Hosts.store is None:
        return "the others before they had met"
    try:
        _Hosts.store.set(f"here/{ranks.rank}", "yes")
        deadline = time.monotonic() + MISSING_RANKS_WAIT_S
        others = set(range(ranks.world_size)) - {ranks.rank}
        while others and time.monotonic() < deadline:
            others -= {rank for rank in others if _Hosts.store.check([f"here/{rank}"])}
            time.sleep(0.1)
    except (dist.DistError, RuntimeError):  # the store lives with the first rank
        return "rank 0, or the machine that it runs on"
    if not others:
        return "another rank for a while"
    return "rank " + ", ".join(map(str, sorted(others)))


def wait_for_main(ranks: Ranks, what: str) -> None:
    """Wait, however long it takes, until the first rank has come here too; it does not wait.

    For what one rank does for all, such as preparing a dataset. The wait can be interrupted.
    """
    if ranks.is_single_process:
        return
    if ranks.is_main:
        _Hosts.store.set(f"done/{what}", "yes")
    while not _Hosts.store.check([f"done/{what}"]):
        time.sleep(0.05)


def wrap(model: nn.Module, ranks: Ranks, device: Device) -> nn.Module:
    """The network with its gradients averaged over the ranks."""
    if ranks.is_single_process or not device.averages_in_backward:
        return model
    ids = [device.torch_device] if device.torch_device.index is not None else None
    ddp = nn.parallel.DistributedDataParallel
    # Batch norm's statistics are averaged before they are used, not copied at every step.
    options: dict[str, Any] = dict(no_buffer_sync(ddp))
    return ddp(model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=100, **options)


def any_rank(flags: Sequence[bool], ranks: Ranks) -> list[bool]:
    """Which flags any rank raised; every rank gets the same answer. The device is not asked."""
    if ranks.is_single_process:
        return list(flags)
    raised = torch.tensor([int(flag) for flag in flags])
    dist.all_reduce(raised, dist.ReduceOp.MAX, group=_Hosts.group)
    return [bool(flag) for flag in raised.tolist()]


def average(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The mean of a tensor over the ranks."""
    if ranks.is_single_process:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / ranks.world_size


def average_batch_norms(model: nn.Module, ranks: Ranks) -> None:
    """Average the running statistics, which each rank gathers from its own images."""
    if ranks.is_single_process:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= ranks.world_size


def barrier(ranks: Ranks) -> None:
    """Wait for every rank."""
    any_rank([False], ranks)


def gather_to_first(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the order of the ranks, on the first rank; nothing on the others."""
    if ranks.is_single_process:
        return [value]
    values: list[Any] = [None] * ranks.world_size
    dist.gather_object(value, values if ranks.is_main else None, group=_Hosts.group)
    return values if ranks.is_main else []


def together(ranks: Ranks, *, one_voice: bool = False) -> Together:
    """The ranks as evaluation knows them; an error of one ends all.

    Args:
        ranks: This process and the others.
        one_voice: The first rank alone says the error: the others have no log to say it in.
    """

    def share(value: Any) -> Any:
        value = broadcast(value, ranks)
        if one_voice and isinstance(value, SsdctlError) and not ranks.is_main:
            raise SystemExit(value.exit_code)
        return value

    return Together(
        rank=ranks.rank,
        world_size=ranks.world_size,
        gather=functools.partial(gather_to_first, ranks=ranks),
        broadcast=share,
        barrier=functools.partial(barrier, ranks),
    )


def broadcast(value: T, ranks: Ranks) -> T:
    """The first rank's value, on every rank."""
    if ranks.is_single_process:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=_Hosts.group)
    return box[0]
