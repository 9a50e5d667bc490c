"""A private folder on this machine's own disk, for caches that must not be on a shared one."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

NETWORK_FILE_SYSTEMS = {
    *("nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "fuse.ceph", "gpfs", "beegfs", "pvfs2"),
    *("afs", "9p", "fuse.sshfs", "fuse.glusterfs", "glusterfs", "wekafs"),
}
MOUNTS = Path("/proc/mounts")


def private_cache_dir(name: str) -> Path | None:
    """Return `$TMPDIR/ssdctl-UID/NAME` (or in /tmp), created for this user only.

    None if another user owns that path, if it is a symbolic link, or if others may write to it:
    anybody may create names in a shared temporary folder.
    """
    root = Path(os.environ.get("TMPDIR") or "/tmp", f"ssdctl-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return None
        if status.st_mode & 0o077:
            return None
        folder = root / name
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def is_on_network(path: Path) -> bool:
    """Return whether a path is on a file system of another machine; False if that is unknown."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    resolved = path.resolve()
    mounts = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    holding = [
        (place.replace("\\040", " "), kind)
        for place, kind in mounts
        if resolved.is_relative_to(place.replace("\\040", " "))
    ]
    return bool(holding) and max(holding, key=lambda mount: len(mount[0]))[1] in (
        NETWORK_FILE_SYSTEMS
    )
