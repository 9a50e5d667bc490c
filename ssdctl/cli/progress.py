"""How a run shows itself: a block that redraws on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from ssdctl.cli.console import Console, rich_console
from ssdctl.runtime.printable import printable_message

BAR_WIDTH = 32


class TrainingDisplay:
    """Shows the records of metrics.jsonl as they come."""

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

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(printable_message(text))
        else:
            self._console.say(text)

    def warn(self, text: str) -> None:
        """A line that stays, said even with -q."""
        if self._live is not None:
            self._live.console.print(f"warning: {printable_message(text)}", style="yellow")
        else:
            self._console.warn(text)

    def show(self, record: dict[str, Any]) -> None:
        """One record of the run."""
        if record["kind"] == "train":
            if self._live is not None:
                self._live.update(self._block(record))
            else:
                left = self._time_left(record)
                self._console.say(describe(record) + (f"  {left} left" if left else ""))
        elif record["kind"] == "eval":
            self.say(describe(record))
        elif record["event"] == "started":
            self._plan = record

    def _time_left(self, record: dict[str, Any]) -> str:
        """As 1:02:03; nothing where the rate is not known."""
        if not self._plan or record["images_per_second"] <= 0:
            return ""
        steps = self._plan["total_steps"] - record["step"]
        seconds = int(steps * self._plan["global_batch_size"] / record["images_per_second"])
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _block(self, record: dict[str, Any]) -> Any:
        """The run as it stands: where it is, what it computes, what it waits for."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        total = self._plan.get("total_steps", record["step"])
        place = Table.grid(padding=(0, 2))
        place.add_row(
            Text(f"step {record['step']:,}/{total:,}", style="bold"),
            ProgressBar(total=total, completed=record["step"], width=BAR_WIDTH),
            Text(f"epoch {record['epoch']:.2f}"),
            Text(f"{self._time_left(record)} left"),
        )
        figures = Text(
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
        return Group(place, figures, speed)


def describe(record: dict[str, Any]) -> str:
    """One line about a record."""
    place = f"step {record['step']}  epoch {record['epoch']:.2f}"
    if record["kind"] == "eval":
        figures = "  ".join(f"{name} {record[name]:.3f}" for name in ("AP", "AP50", "AP75"))
        return f"{place}  {figures}"
    wait = f"  waits {record['data_wait']:.0%} for images" if record["data_wait"] >= 0.05 else ""
    return (
        f"{place}  loss {record['loss']:.3f} (box {record['loss_box']:.3f} class "
        f"{record['loss_class']:.3f})  lr {record['lr']:.2e}  "
        f"{record['images_per_second']:.1f} img/s{wait}"
    )
