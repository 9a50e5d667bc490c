"""Display the progress of a training run: a redrawn block on a terminal, else plain lines."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ssdctl.cli.console import Console, rich_console
from ssdctl.runs.progress import describe
from ssdctl.runtime.printable import printable_message

BAR_WIDTH = 32


class TrainingDisplay:
    """Show the records of metrics.jsonl as the run writes them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None
        self._plan: dict[str, Any] = {}

    def __enter__(self) -> TrainingDisplay:
        self._console.handler.sink = self
        if self._console.live:
            from rich.live import Live

            self._live = Live(console=rich_console(sys.stderr), refresh_per_second=4)
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

    def show(self, record: dict[str, Any]) -> None:
        """Show one record of the run."""
        if record["kind"] == "train":
            if self._live is not None:
                self._live.update(self._block(record))
            else:
                left = self._time_left(record)
                self._console.info(describe(record) + (f"  {left} left" if left else ""))
        elif record["kind"] in ("eval", "epoch"):
            self.info(describe(record))
        elif record.get("event") == "started":
            self._plan = record

    def _time_left(self, record: dict[str, Any]) -> str:
        """Return the remaining time as 1:02:03, or an empty text if the rate is unknown."""
        if not self._plan or record["images_per_second"] <= 0:
            return ""
        steps = self._plan["total_steps"] - record["step"]
        seconds = int(steps * self._plan["global_batch_size"] / record["images_per_second"])
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _block(self, record: dict[str, Any]) -> Any:
        """Return the current state of the run: position, losses, speed and memory."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = self._plan.get("total_steps", record["step"])
        position = Table.grid(padding=(0, 2))
        position.add_row(
            Text(f"step {record['step']:,}/{total:,}", style="bold"),
            ProgressBar(total=total, completed=record["step"], width=BAR_WIDTH),
            Text(f"epoch {record['epoch']:.2f}"),
            Text(f"{self._time_left(record)} left"),
        )
        losses = Text(
            f"loss {record['loss']:.3f} (box {record['loss_box']:.3f} class "
            f"{record['loss_class']:.3f})  lr {record['lr']:.2e}",
            style="cyan",
            overflow="ellipsis",
            no_wrap=True,
        )
        speed = Text(
            f"{record['images_per_second']:.1f} img/s, {record['data_wait']:.0%} of the time "
            f"waiting for images  memory {record['memory_bytes'] / 1e9:.1f} GB",
            style="yellow" if record["data_wait"] > 0.2 else "cyan",
            overflow="ellipsis",
            no_wrap=True,
        )
        return Group(position, losses, speed)
