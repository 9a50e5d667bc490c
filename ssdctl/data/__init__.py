"""Read, convert and check datasets; write the store that training reads.

Here: where stores are without --store, and the command that prepares one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from ssdctl.runtime.safe_text import quoted
from ssdctl.runtime.system import expand_home, user_temporary_dir

TOML = "dataset.toml"
STORE_NAME = "prepared"


def usual_store(root: Path) -> Path:
    """Return the folder of the store in a dataset folder, or next to a file such as data.yaml."""
    return root.with_name(f"{root.name}.{STORE_NAME}") if root.is_file() else root / STORE_NAME


def cached_store(root: Path) -> Path:
    """Return the folder of the store in the user's cache, for a dataset that is read-only."""
    key = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return cache_folder() / "datasets" / f"{root.resolve().name}-{key}"


def is_cached_store(folder: Path) -> bool:
    """Return whether this folder was chosen since the dataset folder is read-only."""
    return folder.parent == cache_folder() / "datasets"


def prepare_command(root: Path, folder: Path | None = None, *options: str) -> str:
    """Return the command that prepares a dataset in this store; None: the one without --store."""
    usual = usual_store(root).absolute()
    is_usual = folder is None or folder.absolute() == usual or is_cached_store(folder)
    store = "" if is_usual else f" --store {quoted(folder)}"
    return " ".join([f"ssdctl prepare --data {quoted(root)}{store}", *options])


def cache_folder() -> Path:
    """Return `ssdctl` in the user's cache folder, or a folder in /tmp if the cache is read-only."""
    base = expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base is None:
        return user_temporary_dir()
    existing = next((path for path in (base, *base.parents) if path.exists()), base)
    if is_writable(existing):
        return base / "ssdctl"
    return user_temporary_dir()


def is_writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def is_refused(store: Path) -> bool:
    """Return whether there is a store that this user may not read."""
    if not store.exists():
        return False
    return not all(os.access(path, os.R_OK) for path in (store, *store.glob("index-*.arrow")))
