"""The one way to write a file: a temporary beside it, fsync, rename, fsync of the folder.

A reader sees the old file or the new one, never a part. A killed writer leaves a temporary
(`.NAME.PID.tmp`) that `remove_stale_temporaries` clears at the next start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from ssdctl.errors import DiskError, IntegrityError, UsageError
from ssdctl.runtime.redact import redact_url

TEMPORARY_SUFFIX = ".tmp"
COPY_BYTES = 1024 * 1024


@contextlib.contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Turn the disk's refusals into a `DiskError` (exit 6) that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if str(where).endswith(TEMPORARY_SUFFIX):
            where = path  # nobody asked for the temporary
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskError(
                f"no space left while {doing} {where}", hint="free some space, then run it again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise DiskError(
                f"no permission while {doing} {where}: {error.strerror}",
                hint="choose a folder you may write to, or change its owner",
            ) from error
        if error.errno in (
            errno.ENOTDIR,
            errno.ENOENT,
            errno.EEXIST,
            errno.EISDIR,
            errno.EIO,
            errno.ENAMETOOLONG,
        ):
            hint = None if error.errno == errno.EIO else "choose another name or folder"
            raise DiskError(f"{error.strerror} while {doing} {where}", hint=hint) from error
        raise


def refuse_url(path: str | Path, option: str) -> None:
    """Refuse a URL where a local folder is expected.

    Raises:
        UsageError: It is a URL, as `s3://bucket/data`, which a `Path` holds as `s3:/bucket/data`.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) and not Path(path).exists():
        url = redact_url(re.sub(r":/+", "://", str(path), count=1))
        raise UsageError(
            f"{option} {url}: is a URL, not a local folder",
            hint="mount it (mount-s3, rclone mount) or copy it (aws s3 sync, rclone copy), "
            "and give that folder",
        )


def make_dir(path: Path) -> Path:
    """Create a folder and its parents; return it."""
    with disk_errors(path, "creating"):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that appears at `path` whole, when the block ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    with disk_errors(path, "writing"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_dir(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Publish `content` at `path` atomically."""
    with atomic_write(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Publish `content` at `path` atomically, as UTF-8."""
    write_bytes(path, content.encode())


def sync_dir(path: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems refuse to sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def link_or_copy(source: Path, target: Path) -> None:
    """Publish `source` under a second name: a hard link where possible, else a copy."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    with disk_errors(target, "writing"):
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            with source.open("rb") as file, atomic_write(target) as copy:
                shutil.copyfileobj(file, copy, COPY_BYTES)
            return
        temporary.replace(target)
        temporary.unlink(missing_ok=True)  # a rename onto the same file does nothing
        sync_dir(target.parent)


def remove_stale_temporaries(folder: Path) -> list[Path]:
    """Delete the temporaries of writers that died in `folder`; return what went.

    To be called before this process writes there: in a pod that was started again it has, as
    often as not, the dead writer's process id.
    """
    removed = []
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        writer = path.name.removesuffix(TEMPORARY_SUFFIX).rpartition(".")[2]
        is_alive = writer != str(os.getpid()) and Path(f"/proc/{writer}").exists()
        if writer.isdigit() and not is_alive:
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def is_plain_name(name: str) -> bool:
    """Whether an untrusted name is a relative path that stays below where it is put."""
    if not name or "\0" in name or "\\" in name or name.startswith("/"):
        return False
    return ".." not in name or ".." not in name.split("/")


def safe_join(root: Path, name: str) -> Path:
    """`root / name` for an untrusted relative name; IntegrityError where it would leave `root`.

    Judged by the name alone, so a symbolic link inside `root` that the user made stays usable.
    """
    if not is_plain_name(name):
        raise IntegrityError(f"{name!r} is no plain path below {root}")
    return root / name


@contextlib.contextmanager
def lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path`, waiting for its owner; `on_wait` hears of the wait.

    The kernel drops the lock with the process that held it, so a dead owner's is never in the way.
    """
    with disk_errors(path, "locking"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        file.close()


def free_bytes(path: Path) -> int:
    """Free space on the disk that will hold `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
