"""Show progress: as one redrawn line on a terminal or in a notebook, or not at all."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

# progress(items, total=..., label=..., unit=...) yields the items; see Console.progress.
Progress = Callable[..., Iterable[Any]]
T = TypeVar("T")
NOTEBOOK_COLUMNS = 100
REFRESH_HZ = 4


def without_progress(items: Iterable[T], **_: Any) -> Iterable[T]:
    """Return the items; nothing is shown."""
    return items


def progress_bar(
    items: Iterable[T], *, total: int | None = None, label: str = "", unit: str = "it"
) -> Iterator[T]:
    """Yield the items, with a progress bar on a terminal and in a notebook."""
    if not can_redraw():
        yield from items
        return
    from rich.progress import MofNCompleteColumn, ProgressColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{speed:,.1f} {unit}/s" if speed else "", style="cyan")

    with _bar(MofNCompleteColumn(), Rate()) as bar:
        yield from bar.track(items, total=total, description=label)


def byte_bar() -> Bar:
    """Return a bar for a task that counts bytes, with their rate; start and stop it."""
    from rich.progress import DownloadColumn, TaskProgressColumn, TransferSpeedColumn

    return _bar(TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn())


def _bar(*columns: ProgressColumn) -> Bar:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        *columns,
        TimeRemainingColumn(),
        console=_console(),
        transient=True,
        refresh_per_second=REFRESH_HZ,
    )


def can_redraw() -> bool:
    """Return whether stderr is a terminal, or this is a notebook."""
    return _is_notebook() or sys.stderr.isatty()


@contextlib.contextmanager
def live_line(get_line: Callable[[int], RenderableType]) -> Iterator[Live]:
    """Redraw a line several times a second for the duration of the block, and remove it then.

    Args:
        get_line: Returns the line for a number of columns; called on another thread.
    """
    from rich.live import Live

    console = _console()
    with Live(
        get_renderable=lambda: get_line(console.width),
        console=console,
        refresh_per_second=REFRESH_HZ,
        transient=True,
        redirect_stdout=False,
    ) as live:
        yield live


def _console() -> Console:
    """Return a rich console on stderr or in the notebook."""
    from rich.console import Console

    plain: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}
    if not _is_notebook():
        return Console(file=sys.stderr, **plain)
    if importlib.util.find_spec("ipywidgets") is not None:
        return Console(**plain)
    # Without widgets rich shows nothing, but a cell's output obeys a carriage return.
    plain |= {"force_terminal": True, "force_jupyter": False, "width": NOTEBOOK_COLUMNS}
    return Console(file=sys.stderr, **plain)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
