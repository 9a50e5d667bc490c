"""Progress display and timeouts of the commands that download."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ssdctl.cli.console import rich_console
from ssdctl.cli.interrupts import stoppable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ssdctl.cli.console import Console
    from ssdctl.download.transfer import Patience

READING = ("checking ", "verifying ", "unpacking ")
LINE_S = 30.0  # between two lines of progress if no display can be drawn


class ByteProgress:
    """Shows bytes, rate and time left over all files: a display on a terminal, lines elsewhere.

    Called as the transfer's `report`: (label, bytes done, bytes in total). The label is a file's
    name while it is fetched; while it is verified or unpacked, a verb and the name.

    Args:
        console: Where it is displayed.
        expected: The files to fetch and their bytes; with several there is a line for all of them.
    """

    def __init__(self, console: Console, expected: Mapping[str, int] | None = None) -> None:
        self._console = console
        self._expected = dict(expected or {})
        self._arrived = dict.fromkeys(self._expected, 0)
        self._label = ""
        self._display: Progress | None = None
        self._all: TaskID | None = None
        self._current: TaskID | None = None
        self._first = self._last_line = (0.0, 0)

    def __call__(self, label: str, done: int, total: int) -> None:
        self._count(label, done)
        if self._console.live:
            self._draw(label, done, total)
        elif label != self._label:
            self._begin(label, done, total)
        elif time.monotonic() - self._last_line[0] >= LINE_S:
            self._print_line(label, done, total)
        self._label = label

    def close(self) -> None:
        """Remove the display."""
        if self._display is not None:
            self._display.stop()
            self._display = self._all = self._current = None
        self._label = ""

    def _count(self, label: str, done: int) -> None:
        """Keep the account of all files."""
        name = label.rpartition(" ")[2]
        if label in self._arrived:
            self._arrived[label] = done
        elif name in self._arrived and not label.startswith("checking"):
            self._arrived[name] = self._expected[name]  # fetched: else it would not be verified

    def _draw(self, label: str, done: int, total: int) -> None:
        if self._display is None:
            self._display = _byte_display()
            if len(self._expected) > 1:
                whole = sum(self._expected.values())
                here = sum(self._arrived.values())
                self._all = self._display.add_task("all files", total=whole, completed=here)
            self._display.start()
        if label != self._label or self._current is None:
            if self._current is not None:
                self._display.remove_task(self._current)
            # Bytes that were here already are no part of the rate.
            self._current = self._display.add_task(label, total=total, completed=done)
        self._display.update(self._current, completed=done)
        if self._all is not None:
            self._display.update(self._all, completed=sum(self._arrived.values()))

    def _begin(self, label: str, done: int, total: int) -> None:
        self._first = self._last_line = (time.monotonic(), done)
        is_fetched = not label.startswith(READING)  # else what is done was read a moment ago
        here = f", {done / 1e6:,.1f} MB here already" if is_fetched and 0 < done < total else ""
        self._console.say(f"{label}: {total / 1e6:,.1f} MB{here}")

    def _print_line(self, label: str, done: int, total: int) -> None:
        begun, had = self._first
        rate = (done - had) / (time.monotonic() - begun)
        text = f"{label}: {100 * done / max(total, 1):.0f}%, {rate / 1e6:.1f} MB/s"
        if rate > 0:
            text += f", {_minutes(total - done, rate)} left"
        if len(self._expected) > 1:
            whole, here = sum(self._expected.values()), sum(self._arrived.values())
            text += f"; all files: {100 * here / max(whole, 1):.0f}%"
            if rate > 0 and label in self._expected:
                text += f", {_minutes(whole - here, rate)} left"
        self._console.say(text)
        self._last_line = (time.monotonic(), done)


def _minutes(num_bytes: int, rate: float) -> str:
    minutes = round(num_bytes / rate / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _byte_display() -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=rich_console(sys.stderr),
        transient=True,
        expand=True,
        refresh_per_second=4,
    )


@contextlib.contextmanager
def fetching(console: Console, expected: Mapping[str, int] | None = None) -> Iterator[ByteProgress]:
    """A progress display around work that may be stopped: Ctrl-C and SIGTERM end it with 75.

    Raises:
        Stopped: A signal came. What arrived is kept.
    """
    progress = ByteProgress(console, expected)
    with stoppable("what arrived is kept"):
        try:
            yield progress
        finally:
            progress.close()


def patience(timeout_s: float) -> Patience:
    """Timeouts that fit a deadline of `timeout_s`: a silent connection gets two chances in it."""
    from ssdctl.download.transfer import Patience

    default = Patience()
    return default._replace(
        stall_s=timeout_s,
        read_s=min(default.read_s, timeout_s / 2),
        connect_s=min(default.connect_s, timeout_s / 2),
    )
