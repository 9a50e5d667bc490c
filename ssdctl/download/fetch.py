"""Fetch one pinned file: resumable, verified and published atomically.

    fetch(PinnedFile("a.zip", "https://...", sha256, num_bytes), Path("data")) -> Path("data/a.zip")

During the download, `a.zip.part`, `a.zip.part.state` and `a.zip.lock` are next to the target; a
file with the wrong hash is kept as `a.zip.corrupt` for inspection. Proxies and CA bundles are those
of the environment (HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
from requests.adapters import HTTPAdapter

from ssdctl.download.http_response import NotFound
from ssdctl.download.partial_file import Part, part_paths, remove_part
from ssdctl.download.retry import RetryPolicy
from ssdctl.download.sources import PinnedFile
from ssdctl.download.transfer import Order, Report, length_of, transfer
from ssdctl.errors import DiskError, IntegrityError, NetworkError
from ssdctl.files import disk_errors, free_bytes, lock, safe_join
from ssdctl.runtime.redact import redact_url

MAX_REDIRECTS = 10
WEIGHTS_CONNECTIONS = 4
HASH_BYTES = 1024 * 1024
SPARE_BYTES = 16 * 1024 * 1024  # never fill a disk to its last byte
DEFAULT_POLICY = RetryPolicy()


def no_report(label: str, done: int, total: int) -> None:
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
    report: Report = no_report,
) -> Path:
    """Make sure that `file` is in `folder`, complete and verified; return its path.

    Args:
        file: What to fetch, with its pins.
        folder: Created if it does not exist.
        mirror: Base URL to fetch from instead.
        connections: How many at once, if the server supports ranges.
        retry_policy: Timeouts and retries.
        report: Called with (label, bytes done, bytes in total) a few times a second.

    Raises:
        NetworkError: No answer, a refusal, a stall. The received bytes are kept for the next call.
        IntegrityError: The server's file is not the pinned one.
        DiskError: No space (seen before the first byte) or no permission.
    """
    target = safe_join(folder, file.name)
    urls = file.urls(mirror)
    if not _has_leftovers(target) and is_whole(target, file, report):
        return target  # without a lock: the folder may be read-only
    with claim(target):
        if is_whole(target, file, report):
            remove_part(target)
            return target
        with open_session(connections) as session:
            for url in urls:
                try:
                    order = Order(session, url, file.name, connections, retry_policy, report)
                    _fetch_from(order, file, target)
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
    report: Report,
) -> Path:
    """Do what `fetch` does for weights called `name`.

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
            report=report,
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


def is_whole(path: Path, file: PinnedFile, report: Report = no_report) -> bool:
    """Return whether `path` is `file`, by size and hash."""
    try:
        size = path.stat().st_size
    except OSError:
        return False
    if file.bytes is not None and size != file.bytes:
        return False
    return sha256_of(path, f"checking {file.name}", report).startswith(file.sha256)


def sha256_of(path: Path, label: str, report: Report = no_report) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as stream:
        while data := stream.read(HASH_BYTES):
            digest.update(data)
            done += len(data)
            report(label, done, total)
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


class InsecureRedirect(requests.exceptions.InvalidSchema):
    """An HTTPS server redirects to plain HTTP."""


class _Session(requests.Session):
    """Refuses redirects from HTTPS to HTTP."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        try:
            target = super().get_redirect_target(resp)
            destination = urljoin(resp.url, target or "")
            scheme = urlsplit(destination).scheme
        except ValueError as error:  # not UTF-8, or not an address
            resp.close()
            raise requests.exceptions.InvalidURL(f"invalid redirect: {error}") from error
        if scheme == "http" and urlsplit(resp.url).scheme == "https":
            resp.close()
            raise InsecureRedirect(f"refused a redirect from HTTPS to HTTP ({destination})")
        return target


def open_session(connections: int) -> requests.Session:
    """Open a session that follows redirects to http(s) only, through the environment's proxies."""
    session = _Session()
    session.max_redirects = MAX_REDIRECTS
    for scheme in ("http://", "https://"):  # without other adapters, no redirect leads elsewhere
        session.mount(scheme, HTTPAdapter(pool_maxsize=max(connections, 1), max_retries=0))
    return session


def _fetch_from(order: Order, file: PinnedFile, target: Path) -> None:
    """Fetch from one URL into the part, check the hash, publish."""
    num_bytes = file.bytes or length_of(order.session, order.url, order.retry_policy)
    check_space(target.parent, missing_bytes(target, num_bytes), file.name)
    part = Part(target, num_bytes, order.connections, order.url)
    try:
        while True:
            old = bool(part.inherited)
            transfer(order, part)
            digest = sha256_of(part.path, f"verifying {file.name}", order.report)
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
    raise _quarantined(target, file, digest, order.url)


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
