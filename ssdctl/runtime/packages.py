"""Query the installed packages: their versions, and what they add by entry points."""

from __future__ import annotations

import os
import re
import traceback
from importlib import metadata
from typing import Any

from ssdctl.errors import UsageError

LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
NATIVE_PACKAGES = ("numpy", "torch", "pyarrow", "PIL", "torchvision", "matplotlib", "hotcoco")


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


def library_error(error: BaseException | None) -> UsageError | None:
    """Return the error for a package that a shared library keeps from loading; None for others.

    Args:
        error: What an import raised: ImportError, or OSError of ctypes.
    """
    package = ""
    while error is not None:
        package = _importing_package(error) or package
        is_of_import = isinstance(error, (ImportError, OSError))
        if is_of_import and (match := re.search(r"(\S+\.so\S*): ([^\n]+)", str(error))):
            break
        error = error.__cause__ or error.__context__
    else:
        return None
    variables = [name for name in LOADER_VARIABLES if os.environ.get(name)]
    hint = f"reinstall {package or 'the package'}"
    if variables:
        values = " and ".join(f"{name}={os.environ[name]}" for name in variables)
        hint = f"{values} makes the system load other libraries: unset it, or {hint}"
    return UsageError(
        f"{package or 'a package'} cannot be loaded: {match[1]}: {match[2]}", hint=hint
    )


def _importing_package(error: BaseException) -> str:
    """Return the package, not ours, whose import raised an error."""
    names = [
        str(frame.f_globals.get("__name__", "")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next((name for name in names if name in NATIVE_PACKAGES), "")


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
