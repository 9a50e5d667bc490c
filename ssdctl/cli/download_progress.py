"""Progress display and timeouts of the commands that download."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ssdctl.cli.command import stoppable
from ssdctl.cli.console import rich_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ssdctl.cli.console import Console
    from ssdctl.download.http import RetryPolicy

READING = ("checking ", "verifying ", "unpacking ")  # how labels of work on local files begin
LINE_INTERVAL_S = 30.0  # between two lines of progress if there is no terminal


class ByteProgress:
    """Show bytes, rate and remaining time of a transfer: bars on a terminal, else lines.

    The transfer calls it as `report`: (label, bytes done, bytes in total). The label is the name
    of a file that is downloaded, or a verb and the name while it is verified or unpacked.

    Args:
        console: The output of the command.
        expected: The bytes of each file to download; several files also get a line for all of
            them.
    """

    def __init__(self, console: Console, expected: Mapping[str, int] | None = None) -> None:
        self._console = console
        self._expected = dict(expected or {})
        self._received = dict.fromkeys(self._expected, 0)
        self._label = ""
        self._bars: Progress | None = None
        self._all: TaskID | None = None
        self._current: TaskID | None = None
        self._first = self._last_line = (0.0, 0)

    def __call__(self, label: str, done: int, total: int) -> None:
        name = label.rpartition(" ")[2]
        if label in self._received:
            self._received[label] = done
        elif name in self._received and not label.startswith("checking"):
            self._received[name] = self._expected[name]  # complete, as it is verified now
        is_new, self._label = label != self._label, label
        if self._console.live:
            self._draw(label, done, total, is_new)
        elif is_new:
            self._first = self._last_line = (time.monotonic(), done)
            is_resumed = not label.startswith(READING) and 0 < done < total
            resumed = f", {done / 1e6:,.1f} MB already downloaded" if is_resumed else ""
            self._console.info(f"{label}: {total / 1e6:,.1f} MB{resumed}")
        elif time.monotonic() - self._last_line[0] >= LINE_INTERVAL_S:
            self._print_line(label, done, total)

    def close(self) -> None:
        """Remove the display."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = self._all = self._current = None
        self._label = ""

    def _draw(self, label: str, done: int, total: int, is_new: bool) -> None:
        if self._bars is None:
            self._bars = _byte_bars()
            if len(self._expected) > 1:
                self._all = self._bars.add_task("all files", total=sum(self._expected.values()))
            self._bars.start()
        if is_new or self._current is None:
            if self._current is not None:
                self._bars.remove_task(self._current)
            # Bytes of an earlier attempt do not count for the rate.
            self._current = self._bars.add_task(label, total=total, completed=done)
        self._bars.update(self._current, completed=done)
        if self._all is not None:
            self._bars.update(self._all, completed=sum(self._received.values()))

    def _print_line(self, label: str, done: int, total: int) -> None:
        start, done_at_start = self._first
        rate = (done - done_at_start) / (time.monotonic() - start)

        def left(num_bytes: int) -> str:
            if rate <= 0:
                return ""
            hours, minutes = divmod(round(num_bytes / rate / 60), 60)
            return f", {hours} h {minutes} min left" if hours else f", {minutes} min left"

        text = f"{label}: {100 * done / max(total, 1):.0f}%, {rate / 1e6:.1f} MB/s"
        text += left(total - done)
        if len(self._expected) > 1:
            total_bytes, received = sum(self._expected.values()), sum(self._received.values())
            text += f"; all files: {100 * received / max(total_bytes, 1):.0f}%"
            text += left(total_bytes - received) if label in self._expected else ""
        self._console.info(text)
        self._last_line = (time.monotonic(), done)


def _byte_bars() -> Progress:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=None),
        progress.TextColumn("{task.percentage:>3.0f}%"),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=rich_console(sys.stderr),
        transient=True,
        expand=True,
        refresh_per_second=4,
    )


@contextlib.contextmanager
def fetching(console: Console, expected: Mapping[str, int] | None = None) -> Iterator[ByteProgress]:
    """Yield a progress display for work that Ctrl-C and SIGTERM stop with exit code 75.

    Raises:
        Stopped: A signal was received. The downloaded bytes are kept.
    """
    progress = ByteProgress(console, expected)
    with stoppable("the downloaded bytes are kept"):
        try:
            yield progress
        finally:
            progress.close()


def retry_policy(timeout_s: float) -> RetryPolicy:
    """Return timeouts for a limit of `timeout_s` that allows an idle connection one retry."""
    from ssdctl.download.http import RetryPolicy

    default = RetryPolicy()
    return default._replace(
        stall_s=timeout_s,
        read_s=min(default.read_s, timeout_s / 2),
        connect_s=min(default.connect_s, timeout_s / 2),
    )
