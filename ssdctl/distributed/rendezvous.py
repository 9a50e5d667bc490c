"""Wait for all ranks before they join; a signal ends the wait.

PyTorch's own wait for a rank cannot be interrupted, and a rank that a signal ended before it had
joined never arrives: the others would wait for it until they time out.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any

from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import Stopped
from ssdctl.runtime import signals
from ssdctl.runtime.background import run_in_daemon_thread

ARRIVED = "arrived"  # the store's key that counts the ranks
POLL_S = 0.05
RANKS_PER_POLL = 64  # with more ranks each polls less often: a single process answers them all
GRACE_S = 1.0
# Torchrun's store outlives a group: the next one of the same processes needs other keys.
_groups = itertools.count()
MIN_TIMEOUT_S = 300.0  # for ranks that still import, or wait for a node


def rendezvous(ranks: Ranks, timeout_s: float) -> Any:
    """Return the key-value store of all ranks once all have arrived.

    Raises:
        Stopped: A signal came while ranks were missing.
        RuntimeError: Some did not arrive in time, or the first one is gone.
    """
    with signals.ending_at_once():
        store = _connect(ranks)
    store = dist.PrefixStore(f"group-{next(_groups)}", store)  # type: ignore[attr-defined]
    store.add(ARRIVED, 1)
    try:
        with signals.ending_at_once():
            _wait_for_all(store, ranks.world_size, max(timeout_s, MIN_TIMEOUT_S))
    except Stopped:
        if _withdraw(store, ranks.world_size):
            raise
        # All had arrived, and some may have continued: stop where they do.
    return store


def _connect(ranks: Ranks) -> Any:
    """Return the store that all ranks reach. Signals interrupt the wait for it."""
    store = run_in_daemon_thread(
        lambda: next(torch_rendezvous("env://", ranks.rank, ranks.world_size))[0]
    )
    while not store.done():
        time.sleep(POLL_S)
    return store.result()


def _wait_for_all(store: Any, world_size: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            arrived = store.add(ARRIVED, 0)
        except RuntimeError:  # rank 0 is gone; if a signal ended it, ours may be about to arrive
            time.sleep(GRACE_S)
            raise
        if arrived >= world_size:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out: only {arrived} of {world_size} ranks have joined")
        time.sleep(POLL_S * max(1.0, world_size / RANKS_PER_POLL))


def _withdraw(store: Any, world_size: int) -> bool:
    """Remove this rank from the count unless all have arrived; return whether it was removed."""
    with contextlib.suppress(RuntimeError):  # the first rank is gone
        if store.add(ARRIVED, 0) >= world_size:
            return False
        store.add(ARRIVED, -1)
    return True
