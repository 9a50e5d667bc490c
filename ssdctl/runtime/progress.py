"""Show progress by tqdm: a redrawn line on a terminal, a widget in a notebook, or nothing.

Also the texts for durations.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeVar

# progress(items, total=..., label=..., unit=...) yields the items; see Console.progress.
Progress = Callable[..., Iterable[Any]]
T = TypeVar("T")


def without_progress(items: Iterable[T], **_: Any) -> Iterable[T]:
    """Return the items; nothing is shown."""
    return items


def progress_bar(
    items: Iterable[T] | None = None, *, label: str = "", unit: str = "it", **options: Any
) -> Any:
    """Return tqdm's bar, which yields the items; it is removed when it ends.

    Args:
        options: Those of tqdm: `total`, `unit_scale`.
    """
    if items is not None and not can_redraw():
        return items
    options = {"leave": False, "dynamic_ncols": True, "mininterval": 0.25, "miniters": 1, **options}
    return _bar_class()(items, desc=label, unit=unit, disable=not can_redraw(), **options)


@functools.cache
def _bar_class() -> Any:
    """Return tqdm's class without its thread, which outlives the bars.

    Its lock would choose the start method of `multiprocessing` for the whole process.
    """
    # In a notebook without ipywidgets, tqdm.auto writes text, too, but warns.
    has_widgets = _is_notebook() and importlib.util.find_spec("ipywidgets") is not None
    tqdm: Any = importlib.import_module("tqdm.auto" if has_widgets else "tqdm.std").tqdm
    bar_class: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
    if not hasattr(tqdm, "_lock"):
        bar_class.set_lock(threading.RLock())
    return bar_class


def above_bars(stream: IO[str]) -> contextlib.AbstractContextManager[None]:
    """Hide the bars of a terminal for the duration of the block, in which it is written to."""
    if "tqdm" not in sys.modules:
        return contextlib.nullcontext()
    hidden: contextlib.AbstractContextManager[None] = _bar_class().external_write_mode(file=stream)
    return hidden


def can_redraw() -> bool:
    """Return whether stderr is a terminal, or this is a notebook."""
    return _is_notebook() or sys.stderr.isatty()


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def duration(seconds: float) -> str:
    """Return a duration for a sentence: 40 s, 6 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def step_time(seconds: float) -> str:
    """Return the pace of a run: 2.1 s per step, or 40 steps per second."""
    return f"{seconds:.2g} s per step" if seconds >= 0.1 else f"{1 / seconds:.0f} steps per second"
