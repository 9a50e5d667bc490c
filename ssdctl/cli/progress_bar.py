"""Display a training run: start lines, a redrawn line on a terminal, permanent rows."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from ssdctl.cli.console import Console
from ssdctl.runs.metrics import Record
from ssdctl.runs.progress import RunNotices, RunProgress, describe
from ssdctl.runtime.printable import printable_message
from ssdctl.runtime.progress import live_line

if TYPE_CHECKING:
    from rich.live import Live


class TrainingDisplay:
    """Show the records that a run emits (ssdctl/runs/progress.py)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stack = contextlib.ExitStack()
        self._live: Live | None = None
        self._progress = RunProgress()
        self._notices = RunNotices()

    def __enter__(self) -> TrainingDisplay:
        self._console.handler.sink = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live = None
        self._stack.close()
        self._console.handler.sink = self._console

    def info(self, text: str) -> None:
        """Print a permanent line."""
        if self._live is not None:
            self._live.console.print(printable_message(text))
        else:
            self._console.info(text)

    def warning(self, text: str) -> None:
        """Print a warning as a permanent line, even if the console is quiet."""
        if self._live is not None:
            self._live.console.print(f"warning: {printable_message(text)}", style="yellow")
        else:
            self._console.warning(text)

    def show(self, record: Record) -> None:
        """Show one record of the run."""
        self._progress.update(record)
        kind = record["kind"]
        if kind == "start":
            self._start(record)
        elif kind == "position":
            if not record["is_evaluating"] and (notice := self._notices.check(self._progress)):
                self.info(notice)
        elif kind == "eval":
            self._show_evaluation(record)
        elif kind == "epoch" or (kind == "train" and self._live is None):
            left = self._progress.time_left() if kind == "train" else ""
            self.info(describe(record) + (f"  {left} left" if left else ""))

    def _start(self, record: Record) -> None:
        self._console.facts(record["facts"])
        if self._console.verbose and record["details"]:
            self._console.info(record["details"])
        if self._console.live and record["step"] < record["total_steps"]:
            self._live = self._stack.enter_context(live_line(self._progress.line))

    def _show_evaluation(self, record: Record) -> None:
        change, is_best = self._progress.scored(record)
        text = describe(record, change, is_best)
        if self._live is not None:
            self._live.console.print(text, style="bold green" if is_best else "bold")
        else:
            self._console.info(text)
