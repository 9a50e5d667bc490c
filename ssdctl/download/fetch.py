"""Fetch one pinned file: resumable, verified and published atomically.

    fetch(PinnedFile("a.zip", "https://...", sha256, num_bytes), Path("data")) -> Path("data/a.zip")

During the download, `a.zip.part`, `a.zip.part.state` and `a.zip.lock` are next to the target; a
file with the wrong hash is kept as `a.zip.corrupt` for inspection.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ssdctl.download.http import NotFound, RetryPolicy
from ssdctl.download.partial_file import Part, part_paths, remove_part
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.download.transfer import Progress, length_of, transfer
from ssdctl.errors import DiskError, IntegrityError, NetworkError
from ssdctl.files import disk_errors, free_bytes, lock, safe_join
from ssdctl.runtime.redact import redact_url

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
    return Path(home).expanduser() / "hub" / "checkpoints"


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

    Args:
        file: What to fetch, with its pins.
        folder: Created if it does not exist.
        mirror: Base URL to fetch from instead.
        connections: How many at once, if the server supports ranges.
        retry_policy: Timeouts and retries.
        progress: Called with (label, bytes done, bytes in total) a few times a second.

    Raises:
        NetworkError: No answer, a refusal, a stall. The received bytes are kept for the next call.
        IntegrityError: The server's file is not the pinned one.
        DiskError: No space (seen before the first byte) or no permission.
    """
    target = safe_join(folder, file.name)
    urls = file.urls(mirror)
    if not _has_leftovers(target) and is_whole(target, file, progress):
        return target  # without a lock: the folder may be read-only
    with claim(target):
        if is_whole(target, file, progress):
            remove_part(target)
            return target
        for url in urls:
            try:
                _fetch_from(url, file, target, connections, retry_policy, progress)
                break
            except NotFound as error:
                if url == urls[-1]:
                    others = ", ".join(map(redact_url, urls[:-1]))
                    also = f"; also tried: {others}" if others else ""
                    raise NotFound(f"{error}{also}", hint=error.hint) from None
    return target


def fetch_one(
    name: str,
    file: PinnedFile,
    folder: Path,
    *,
    mirror: str | None,
    retry_policy: RetryPolicy,
    progress: Progress,
) -> Path:
    """Like `fetch`, but for weights called `name`.

    Raises:
        NetworkError: See `fetch`; the hint names the file and its folder.
        IntegrityError, DiskError: See `fetch`.
    """
    try:
        return fetch(
            file,
            folder,
            mirror=mirror,
            connections=WEIGHTS_CONNECTIONS,
            retry_policy=retry_policy,
            progress=progress,
        )
    except NetworkError as error:
        raise NetworkError(
            f"{name}: {error}",
            hint=f"without network: fetch {redact_url(file.url)} on another machine and put it at "
            f"{(folder / file.name).absolute()}; or --set download.mirror=URL",
        ) from error


def claim(target: Path) -> contextlib.AbstractContextManager[None]:
    """Hold an exclusive lock on the download of `target`, in this and other processes."""
    return lock(_lock_path(target), is_temporary=True)


def _lock_path(target: Path) -> Path:
    return target.with_name(target.name + ".lock")


def _has_leftovers(target: Path) -> bool:
    """Return whether an interrupted or a running download has left files that may be removed."""
    leftovers = [*part_paths(target), _lock_path(target)]
    return any(path.exists() for path in leftovers) and os.access(target.parent, os.W_OK)


def is_whole(path: Path, file: PinnedFile, progress: Progress = no_progress) -> bool:
    """Return whether `path` is `file`, by size and hash."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    if file.bytes is not None and size != file.bytes:
        return False
    return sha256_of(path, f"checking {file.name}", progress).startswith(file.sha256)


def sha256_of(path: Path, label: str, progress: Progress = no_progress) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        while data := stream.read(HASH_BYTES):
            digest.update(data)
            done += len(data)
            progress(label, done, total)
    return digest.hexdigest()


def missing_bytes(target: Path, num_bytes: int) -> int:
    """Return how many more bytes the download of `target` will take on the disk."""
    try:
        allocated = part_paths(target)[0].stat().st_blocks * 512
    except OSError:
        allocated = 0
    return max(num_bytes - allocated, 0)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Check before the first byte that there is enough disk space.

    Raises:
        DiskError: Less than `needed` bytes and a reserve are free.
    """
    free = free_bytes(folder.absolute())
    if needed and free < needed + SPARE_BYTES:
        raise DiskError(
            f"{what} needs {needed / 1e9:,.2f} GB more in {folder}, {free / 1e9:,.2f} GB are free",
            hint="free some space or choose another folder with --dest",
        )


def _fetch_from(
    url: str,
    file: PinnedFile,
    target: Path,
    connections: int,
    policy: RetryPolicy,
    progress: Progress,
) -> None:
    """Fetch from one URL into the part, check the hash, publish."""
    num_bytes = file.bytes or length_of(url, policy)
    check_space(target.parent, missing_bytes(target, num_bytes), file.name)
    part = Part(target, num_bytes, connections, url)
    try:
        while True:
            old = bool(part.inherited)
            transfer(url, part, file.name, connections, policy, progress)
            digest = sha256_of(part.path, f"verifying {file.name}", progress)
            if digest.startswith(file.sha256):
                part.publish(target)
                return
            # Bytes of an earlier run may be from another server, or lost in a power cut: try again.
            if not old:
                break
            part.reset("")
    finally:
        unused = part.arrived_bytes == 0
        part.close()
        if unused:
            remove_part(target)
    raise _quarantined(target, file, digest, url)


def _quarantined(target: Path, file: PinnedFile, digest: str, url: str) -> IntegrityError:
    corrupt = target.with_name(target.name + ".corrupt")
    with disk_errors(corrupt, "writing"):
        part_paths(target)[0].replace(corrupt)
        remove_part(target)
    return IntegrityError(
        f"{file.name} from {redact_url(url)}: its SHA-256 is {digest}, pinned is {file.sha256}; "
        f"kept as {corrupt}",
        hint="run it again; if the hash is the same, the source has another file: try --mirror",
    )
