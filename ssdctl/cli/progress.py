"""How a run shows itself: a line that redraws on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ssdctl.cli.console import Console

BAR_WIDTH = 24


class TrainingDisplay:
    """Shows the records of metrics.jsonl as they come."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None
        self._last_train: dict[str, Any] = {}

    def __enter__(self) -> TrainingDisplay:
        if self._console.live:
            from rich.console import Console as RichConsole
            from rich.live import Live

            self._live = Live(console=RichConsole(file=sys.stderr), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._console.say(text)

    def warn(self, text: str) -> None:
        """A line that stays, said even with -q."""
        if self._live is not None:
            self._live.console.print(f"warning: {text}", style="yellow", markup=False)
        else:
            self._console.warn(text)

    def show(self, record: dict[str, Any]) -> None:
        """One record of the run."""
        if record["kind"] == "train":
            if self._live is not None:
                from rich.text import Text

                self._live.update(Text(describe(record), style="cyan", overflow="ellipsis"))
            else:
                self._console.say(describe(record))
        elif record["kind"] == "eval":
            self.say(describe(record))


def describe(record: dict[str, Any]) -> str:
    """One line about a record."""
    place = f"step {record['step']}  epoch {record['epoch']:.2f}"
    if record["kind"] == "eval":
        figures = "  ".join(f"{name} {record[name]:.3f}" for name in ("AP", "AP50", "AP75"))
        return f"{place}  {figures}"
    return (
        f"{place}  loss {record['loss']:.3f} (box {record['loss_box']:.3f} class "
        f"{record['loss_class']:.3f})  lr {record['lr']:.2e}  "
        f"{record['images_per_second']:.1f} img/s"
    )
