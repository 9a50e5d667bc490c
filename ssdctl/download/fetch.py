"""Fetch one pinned file: resumable, verified and published atomically.

    fetch(PinnedFile("a.zip", "https://...", sha256, num_bytes), Path("data")) -> Path("data/a.zip")

During the download, `.a.zip.ssdctl-part` and `a.zip.lock` are next to the target. A file with the
wrong hash is kept as `a.zip.corrupt` (or `.corrupt1` and so on) for inspection.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from ssdctl.download.http import MIRROR, NotFound, RetryPolicy, length_of
from ssdctl.download.pinned_files import DetectorSource, PinnedFile
from ssdctl.download.transfer import PartialFile, Progress, partial_path, short_name, transfer
from ssdctl.errors import DiskError, IntegrityError, NetworkError
from ssdctl.files import (
    disk_errors,
    free_bytes,
    lock,
    numbered,
    safe_join,
    set_aside,
    write_text,
)
from ssdctl.runtime.safe_text import redact_url
from ssdctl.runtime.system import expand_home, user_temporary_dir

log = logging.getLogger(__name__)
WEIGHTS_CONNECTIONS = 4
HASH_BYTES = 1024 * 1024
SPARE_BYTES = 16 * 1024 * 1024  # never fill a disk to its last byte
DEFAULT_POLICY = RetryPolicy()


def no_progress(label: str, done: int, total: int) -> None:
    """Ignore the progress."""


def torch_cache_dir() -> Path:
    """Return the folder of torch.hub's checkpoints: `hub/checkpoints` of $TORCH_HOME, by default
    `~/.cache/torch` ($XDG_CACHE_HOME honored)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or f"{cache}/torch"
    return (expand_home(home) or user_temporary_dir()) / "hub" / "checkpoints"


def fetch(
    file: PinnedFile,
    folder: Path,
    *,
    mirror: str | None = None,
    connections: int = 8,
    retry_policy: RetryPolicy = DEFAULT_POLICY,
    progress: Progress = no_progress,
) -> Path:
    """Make sure that `file` is in `folder`, complete and verified; return its path.

    `mirror` is a base URL to fetch from instead. Several connections are used if the server
    supports ranges. Another file of that name is kept as NAME.replaced.

    Raises:
        NetworkError: No answer, a refusal, a stall. The received bytes are kept for the next call.
        IntegrityError: The server's file is not the pinned one.
        DiskError: No space (seen before the first byte) or no permission.
    """
    target = safe_join(folder, file.name)
    urls = file.urls(mirror)
    has_leftovers = partial_path(target).exists() or _lock_path(target).exists()
    may_clean = has_leftovers and os.access(target.parent, os.W_OK)
    if not may_clean and is_whole(target, file, progress):
        return target  # without a lock: the folder may be read-only
    with claim(target):
        if is_whole(target, file, progress):
            partial_path(target).unlink(missing_ok=True)
            return target
        for url in urls:
            try:
                _fetch_from(url, file, target, connections, retry_policy, progress)
                return target
            except NotFound as error:
                absent = error
    others = ", ".join(map(redact_url, urls[:-1]))
    also = f"; also tried: {others}" if others else ""
    raise NotFound(f"{absent}{also}", hint=absent.hint)


def fetch_one(name: str, file: PinnedFile, folder: Path, **how: Any) -> Path:
    """Like `fetch`, but the hint of a NetworkError says where to put the weights called `name`."""
    try:
        return fetch(file, folder, connections=WEIGHTS_CONNECTIONS, **how)
    except NetworkError as error:
        raise NetworkError(
            f"{name}: {error}",
            hint=f"without network: fetch {redact_url(file.url)} on another machine and put it at "
            f"{(folder / file.name).absolute()}; or {MIRROR}",
        ) from error


def cached_detector(detector: DetectorSource, dest: Path | None = None) -> Path | None:
    """Return the detector's verified file in `dest` (default: torch.hub's cache), or None."""
    path = (dest or torch_cache_dir()) / detector.file.name
    if detector.trust == "prefix":
        return path if is_whole(path, detector.file) else None
    if not path.is_file() or not checksum_path(path).is_file():
        return None
    remember_checksum(path)
    return path


def fetch_detector(detector: DetectorSource, dest: Path | None = None, **how: Any) -> Path:
    """Return the file of a detector, fetched if `dest` (default: the cache) has none.

    A file without published checksum still has to pass `remember_checksum` once it has been read.
    `how` are `mirror`, `retry_policy` and `progress` of `fetch`; its errors are raised.
    """
    folder = dest or torch_cache_dir()
    found = cached_detector(detector, folder)
    return found or fetch_one(detector.name, detector.file, folder, **how)


def remember_checksum(path: Path) -> str:
    """Return the SHA-256 of a file that was read; write it next to the file at the first use.

    For NVIDIA's detector no checksum is published: it is fetched over HTTPS, its contents are
    checked by the reader of checkpoints, and later changes by this record.

    Raises:
        IntegrityError: Another one is written there already.
    """
    record, digest = checksum_path(path), sha256_of(path, "")
    if not record.is_file():
        try:
            write_text(record, f"{digest}  {path.name}\n")
        except DiskError as error:  # a read-only cache
            log.warning("later changes of %s will not be noticed: %s", path, error)
        return digest
    with record.open(encoding="utf-8", errors="replace") as file:
        recorded = file.read(len(digest))
    if digest != recorded:
        raise IntegrityError(
            f"{path}: changed since its first use: SHA-256 was {recorded}, is {digest}",
            hint=f"if you trust the new file, delete {record}; else delete both",
        )
    return digest


def checksum_path(path: Path) -> Path:
    """Return the file that records the checksum of `path` at its first use."""
    return path.with_name(path.name + ".sha256")


def corrupt_path(target: Path, num_bytes: int, sha256: str) -> Path:
    """Return where to keep a file with wrong content: a path that is free, or has it already."""
    content = PinnedFile("", "", sha256, num_bytes)
    names = numbered(target.with_name(target.name + ".corrupt"))
    return next(name for name in names if not os.path.lexists(name) or is_whole(name, content))


def claim(target: Path) -> contextlib.AbstractContextManager[None]:
    """Hold an exclusive lock on the download of `target`, in this and other processes."""
    message = f"waiting for another download ({target})"
    return lock(_lock_path(target), message, is_temporary=True)


def _lock_path(target: Path) -> Path:
    return target.with_name(f"{short_name(target)}.lock")


def is_whole(path: Path, file: PinnedFile, progress: Progress = no_progress) -> bool:
    """Return whether `path` is `file`, by size and hash."""
    if not has_size(path, file.bytes):
        return False
    return sha256_of(path, f"checking {file.name}", progress).startswith(file.sha256)


def has_size(path: Path, num_bytes: int | None) -> bool:
    """Return whether a file exists and has this size (None: any)."""
    try:
        return path.stat().st_size == num_bytes or num_bytes is None
    except OSError:
        return False


def sha256_of(
    path: Path, label: str, progress: Progress = no_progress, num_bytes: int | None = None
) -> str:
    """Return the SHA-256 of the first `num_bytes` of a file (None: all), in hex."""
    total = path.stat().st_size if num_bytes is None else num_bytes
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while data := stream.read(min(HASH_BYTES, total - done)):
            digest.update(data)
            done += len(data)
            progress(label, done, total)
    return digest.hexdigest()


def missing_bytes(target: Path, num_bytes: int) -> int:
    """Return how many more bytes the download of `target` will take on the disk."""
    try:
        allocated = partial_path(target).stat().st_blocks * 512
    except OSError:
        allocated = 0
    return max(num_bytes - allocated, 0)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise DiskError unless `needed` bytes and a reserve are free, before the first byte."""
    free, least = free_bytes(folder.absolute()), needed + SPARE_BYTES
    if needed and free < least:
        raise DiskError(
            f"{what} needs {least / 1e9:,.3f} GB more in {folder}, {free / 1e9:,.3f} GB are free",
            hint="free some space or choose another folder (--dest; TORCH_HOME for weights)",
        )


def _fetch_from(
    url: str,
    file: PinnedFile,
    target: Path,
    connections: int,
    policy: RetryPolicy,
    progress: Progress,
) -> None:
    num_bytes = file.bytes or length_of(url, policy)
    check_space(target.parent, missing_bytes(target, num_bytes), file.name)
    partial = PartialFile(target, num_bytes, connections)
    try:
        while True:
            transfer(url, partial, file.name, connections, policy, progress)
            digest = sha256_of(partial.path, f"verifying {file.name}", progress, num_bytes)
            if digest.startswith(file.sha256):
                if target.is_file():
                    with disk_errors(target, "renaming"):
                        kept = set_aside(target)
                    log.warning("%s is not the pinned file: it is kept as %s", target, kept.name)
                partial.publish(target)
                return
            if not partial.inherited:
                break
            partial.reset()  # bytes of another version, or lost in a power cut: try again
        corrupt = corrupt_path(target, num_bytes, digest)
        partial.publish(corrupt)
    finally:
        partial.close()
        if partial.arrived_bytes == 0:
            partial.path.unlink(missing_ok=True)
    raise IntegrityError(
        f"{file.name} from {redact_url(url)}: its SHA-256 is {digest}, pinned is {file.sha256}; "
        f"kept as {corrupt}",
        hint=f"run it again; if the hash is the same, the source has another file: try {MIRROR}",
    )
