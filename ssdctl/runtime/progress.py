"""The type of the functions that show the progress of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

# progress(items, total=..., label=..., unit=...) yields the items; see Console.progress.
Progress = Callable[..., Iterable[Any]]
