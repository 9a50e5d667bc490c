"""Show the progress of an iteration: on a terminal, in a notebook, or not at all."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

# progress(items, total=..., label=..., unit=...) yields the items; see Console.progress.
Progress = Callable[..., Iterable[Any]]
T = TypeVar("T")


def without_progress(items: Iterable[T], **_: Any) -> Iterable[T]:
    """Return the items; nothing is shown."""
    return items


def progress_bar(
    items: Iterable[T], *, total: int | None = None, label: str = "", unit: str = "it"
) -> Iterator[T]:
    """Yield the items, with a progress bar on a terminal and in a notebook."""
    yield from open_bar(total, label, unit, items=items)


def open_bar(
    total: int | None, label: str, unit: str, *, items: Iterable[Any] | None = None
) -> Any:
    """Return a tqdm progress bar; it shows nothing if stderr is a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets it shows text, and warns of it
        from tqdm.auto import tqdm
    is_shown = _is_notebook() or sys.stderr.isatty()
    return tqdm(items, total=total, desc=label, unit=unit, leave=False, disable=not is_shown)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
