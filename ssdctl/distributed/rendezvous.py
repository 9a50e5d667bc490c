"""Where ranks meet before they are joined; a signal ends the wait.

PyTorch's own waits for a rank cannot be interrupted, and one that a signal ended before it had
begun never comes: the others would wait for it until they time out.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import Stopped
from ssdctl.runtime import signals
from ssdctl.runtime.background import run_in_daemon_thread

COME = "come"  # the key of the store that counts the ranks
POLL_S = 0.05
RANKS_PER_POLL = 64  # more of them ask less often: one process answers them all
GRACE_S = 1.0
LEAST_WAIT_S = 300.0  # for ranks that still import, or wait for a node


def rendezvous(ranks: Ranks, timeout_s: float) -> Any:
    """The store of all ranks, once all have come.

    Raises:
        Stopped: A signal came while ranks were missing.
        RuntimeError: Some did not come in time, or the first one is gone.
    """
    with signals.ending_at_once():
        store = _first_store(ranks)
    store.add(COME, 1)
    try:
        with signals.ending_at_once():
            _await_all(store, ranks.world_size, max(timeout_s, LEAST_WAIT_S))
    except Stopped:
        if _has_left(store, ranks.world_size):
            raise
        # All were there, and some go on: end where they do.
    return store


def _first_store(ranks: Ranks) -> Any:
    """The store that all ranks reach; this thread hears of signals meanwhile."""
    found = run_in_daemon_thread(
        lambda: next(torch_rendezvous("env://", ranks.rank, ranks.world_size))[0]
    )
    while not found.done():
        time.sleep(POLL_S)
    return found.result()


def _await_all(store: Any, world_size: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            come = store.add(COME, 0)
        except RuntimeError:  # the first rank is gone: by a signal that is on its way here, too?
            time.sleep(GRACE_S)
            raise
        if come >= world_size:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out: {come} of {world_size} ranks have come")
        time.sleep(POLL_S * max(1.0, world_size / RANKS_PER_POLL))


def _has_left(store: Any, world_size: int) -> bool:
    """Withdraw from the ranks that have come, unless all have, and may have gone on."""
    with contextlib.suppress(RuntimeError):  # the first rank is gone
        if store.add(COME, 0) >= world_size:
            return False
        store.add(COME, -1)
    return True
