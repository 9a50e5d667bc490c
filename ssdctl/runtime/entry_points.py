"""Find what other installed packages add: trackers and dataset formats, by entry points."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from ssdctl.errors import UsageError


def entry_point_names(group: str) -> list[str]:
    """Return the names in a group of entry points, such as `ssdctl.trackers`."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def load_entry_point(group: str, name: str) -> Any:
    """Import and return an entry point; None if no installed package has one of that name.

    Raises:
        UsageError: It cannot be imported.
    """
    for entry in metadata.entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:
            raise UsageError(
                f"{name}: the plugin {entry.value} cannot be imported: {error}",
                hint=f"reinstall the package that has the entry point {name} of {group}",
            ) from error
    return None
