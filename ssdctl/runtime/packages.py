"""Query the installed packages: their versions, and what they add by entry points."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from ssdctl.errors import UsageError


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_release(name: str) -> tuple[int, int] | None:
    """Return the major and minor version of an installed package; None if it is absent.

    Alphas of vendor builds (`2.6.0a0+git...`) count as the release that they lead to.
    """
    match = re.match(r"(\d+)\.(\d+)", package_version(name) or "")
    return (int(match[1]), int(match[2])) if match else None


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
