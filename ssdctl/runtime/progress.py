"""Show progress by tqdm: a redrawn line on a terminal, a widget in a notebook, or nothing."""

from __future__ import annotations

import contextlib
import sys
import warnings
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
    with warnings.catch_warnings():  # in a notebook without ipywidgets tqdm writes text
        warnings.filterwarnings("ignore", message="IProgress not found")
        from tqdm.auto import tqdm

    options = {"leave": False, "dynamic_ncols": True, "mininterval": 0.25, **options}
    return tqdm(items, desc=label, unit=unit, disable=not can_redraw(), **options)


def above_bars(stream: IO[str]) -> contextlib.AbstractContextManager[None]:
    """Hide the bars of a terminal for the duration of the block, in which it is written to."""
    if "tqdm" not in sys.modules:
        return contextlib.nullcontext()
    from tqdm import tqdm

    hidden: contextlib.AbstractContextManager[None] = tqdm.external_write_mode(file=stream)
    return hidden


def can_redraw() -> bool:
    """Return whether stderr is a terminal, or this is a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return (shell is not None and "IPKernelApp" in shell.config) or sys.stderr.isatty()
