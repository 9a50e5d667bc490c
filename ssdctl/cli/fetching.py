"""What the commands that fetch share: the progress display, the patience."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ssdctl.cli.stopping import stoppable

if TYPE_CHECKING:
    from tqdm import tqdm

    from ssdctl.cli.console import Console
    from ssdctl.data.transfer import Patience

LINE_S = 30.0  # between two lines of progress where no bar can be drawn


class ByteProgress:
    """Shows bytes, rate and time left: a bar on a terminal, a line now and then elsewhere.

    Called as the engine's `report`: (what is done, bytes done, bytes in all).
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._label = ""
        self._bar: tqdm[Any] | None = None
        self._first = self._told = (0.0, 0)

    def __call__(self, label: str, done: int, total: int) -> None:
        if label != self._label:
            self.close()
            self._label = label
            self._begin(label, done, total)
        if self._bar is not None:
            if done < self._bar.n:
                self._bar.reset(total)  # started from zero
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._told[0] >= LINE_S:
            self._tell(label, done, total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._label = ""

    def _begin(self, label: str, done: int, total: int) -> None:
        if self._console.live:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=done,
                desc=label,
                unit="B",
                unit_scale=True,
                leave=False,
                file=sys.stderr,
            )
            return
        self._first = self._told = (time.monotonic(), done)
        here = f", {done / 1e6:,.1f} MB here already" if done and done < total else ""
        self._console.say(f"{label}: {total / 1e6:,.1f} MB{here}")

    def _tell(self, label: str, done: int, total: int) -> None:
        begun, had = self._first
        rate = (done - had) / (time.monotonic() - begun)
        left = f", {(total - done) / rate / 60:,.0f} min left" if rate > 0 else ""
        share = 100 * done / max(total, 1)
        self._console.say(f"{label}: {share:.0f}%, {rate / 1e6:.1f} MB/s{left}")
        self._told = (time.monotonic(), done)


@contextlib.contextmanager
def fetching(console: Console) -> Iterator[ByteProgress]:
    """A progress display around work that may be stopped: Ctrl-C and SIGTERM end it with 75.

    Raises:
        Stopped: A signal came. What arrived is kept.
    """

    progress = ByteProgress(console)
    with stoppable("what arrived is kept"):
        try:
            yield progress
        finally:
            progress.close()


def patience(timeout_s: float) -> Patience:
    """Timeouts that fit a deadline of `timeout_s`: a silent connection gets two chances in it."""
    from ssdctl.data.transfer import Patience

    default = Patience()
    return default._replace(
        stall_s=timeout_s,
        read_s=min(default.read_s, timeout_s / 2),
        connect_s=min(default.connect_s, timeout_s / 2),
    )
