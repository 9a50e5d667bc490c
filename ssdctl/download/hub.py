"""Models on the Hugging Face Hub: `hf://org/name[@revision]`.

    path = fetch_model(parse_reference("hf://org/name@v1"))  # .../model.safetensors

A model is two files, `model.safetensors` and `config.json`, as `ssdctl push` writes them. Both are
untrusted: their sizes are limited here, their contents are checked by the reader of checkpoints.
The package huggingface_hub (extra `hub`) keeps its own cache, so a model that was fetched once is
also found without network.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import socket
import ssl
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ssdctl.download.fetch import sha256_of
from ssdctl.download.http import TEMPORARY, describe_error
from ssdctl.errors import (
    IntegrityError,
    NetworkError,
    SsdctlError,
    UsageError,
    import_package,
)
from ssdctl.files import disk_error
from ssdctl.runtime.safe_text import HIDDEN, redact_url, redact_urls

log = logging.getLogger(__name__)

SCHEME = "hf://"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
MAX_BYTES = {WEIGHTS: 2 << 30, CONFIG: 16 << 20}
TIMEOUT_S = 10.0  # until the first answer
DEFAULT_REVISION = "main"
UNREACHABLE = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH)
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REFERENCE = re.compile(rf"hf://(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[\w./-]{{1,200}}))?")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{4,}")


class HubReference(NamedTuple):
    """A model repository, at a branch, tag or commit."""

    repo: str  # org/name
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        suffix = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{SCHEME}{self.repo}{suffix}"


def is_reference(name: str) -> bool:
    """Return whether a name has the form of a model on the Hub."""
    return name.lower().startswith(SCHEME)


def parse_reference(text: str) -> HubReference:
    """Return the repository and revision of `hf://org/name[@revision]`, else raise UsageError."""
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text or "--" in match["repo"]:
        raise UsageError(
            f"{redact_url(text)}: not a model on the Hugging Face Hub",
            hint="expected hf://org/name or hf://org/name@REVISION (a branch, tag or commit)",
        )
    return HubReference(match["repo"], match["revision"] or DEFAULT_REVISION)


def fetch_model(reference: HubReference) -> Path:
    """Return the weights of a model in the Hub's cache, with its `config.json` in the same folder.

    Raises:
        UsageError: There is no such repository, revision or file, or huggingface_hub is absent.
        NetworkError: The Hub cannot be reached; the hint says which files to put where.
        IntegrityError: A file is too large, or is not what the Hub lists.
        DiskError: No space or no permission.
    """
    hub = hub_package()
    with no_progress_bars(hub):
        config, problem = _fetch(hub, reference, CONFIG)
        commit = config.parent.name  # so that both files are of one commit
        weights, _ = _fetch(hub, reference._replace(revision=commit), WEIGHTS)
    _check_blob(weights)
    if problem is None:
        log.info("%s: commit %s, from %s", reference, commit, redact_url(endpoint(hub)))
    else:
        text = "%s: the Hub cannot be reached, using commit %s of the cache (%s)"
        log.warning(text, reference, commit, problem)
    return weights


def _fetch(hub: ModuleType, reference: HubReference, name: str) -> tuple[Path, str | None]:
    """Return one file of a repository; from the cache, and why, if the Hub cannot be reached."""
    where = {"revision": reference.revision, "endpoint": endpoint(hub)}
    url = hub.hf_hub_url(reference.repo, name, **where)
    download = functools.partial(hub.hf_hub_download, reference.repo, name, **where)
    try:
        try:
            listed = hub.get_hf_file_metadata(url, timeout=TIMEOUT_S)
        except Exception as error:
            if not _is_unreachable(hub, error):
                raise
            try:
                return Path(download(local_files_only=True)), _reason(hub, error)
            except hub.errors.LocalEntryNotFoundError:
                raise error from None
        if listed.size is None or listed.size > MAX_BYTES[name]:
            raise IntegrityError(
                f"{redact_url(url)}: {listed.size} bytes; the limit is {MAX_BYTES[name]}"
            )
        if listed.size > 1 << 20:
            log.info("%s: %.0f MB", redact_url(url), listed.size / 1e6)
        return Path(download()), None
    except (hub.errors.HTTPError, OSError, RuntimeError) as error:
        raise hub_error(hub, error, str(reference), url) from None


def _check_blob(path: Path) -> None:
    """Compare a file in the cache with its SHA-256, which is the name of the link's target."""
    expected = path.resolve().name
    if re.fullmatch("[0-9a-f]{64}", expected) and (actual := sha256_of(path, WEIGHTS)) != expected:
        raise IntegrityError(
            f"{path}: not the file that the Hub lists: SHA-256 {actual}, not {expected}",
            hint=f"delete {path.resolve()} and run it again",
        )


def hub_error(hub: ModuleType, error: Exception, what: str, url: str) -> SsdctlError:
    """Convert an error of huggingface_hub at `url` to ours, without tokens."""
    errors = hub.errors
    if isinstance(error, RuntimeError) and (number := re.search(r"\(os error (\d+)\)", str(error))):
        error = OSError(int(number[1]), os.strerror(int(number[1])))  # of hf_xet
    if isinstance(error, OSError) and _is_of_disk(error):
        cache = f"{hub.constants.HF_HUB_CACHE} (set by HF_HOME)"
        return disk_error(error, error.filename or cache, f"reading or writing {what} at")
    address, reason = redact_url(url), _reason(hub, error)
    problems = {
        errors.GatedRepoError: "access must be granted on its page first",
        errors.RepositoryNotFoundError: "no such repository, or a private one",
        errors.RevisionNotFoundError: "no such branch, tag or commit",
        errors.EntryNotFoundError: f"no {url.rpartition('/')[2]}: not a model of `ssdctl push`",
    }
    problem = next((text for kind, text in problems.items() if isinstance(error, kind)), None)
    if problem is not None and not isinstance(error, FileNotFoundError):
        return UsageError(
            f"{what}: {problem} ({address})",
            hint="check the name; a private one requires HF_TOKEN, or `hf auth login`",
        )
    if _status(error) in (401, 403):
        return UsageError(
            f"{what}: the Hub refuses it: {reason} ({address})",
            hint="set HF_TOKEN to a token with this permission, or run `hf auth login`",
        )
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return NetworkError(
            f"{what}: {address}: {reason}",
            hint="SSL_CERT_FILE must name the CA file of a proxy with its own certificate",
        )
    return NetworkError(
        f"{what}: {address}: {reason}",
        hint=f"without network: fetch {WEIGHTS} and {CONFIG} from {address.rpartition('/')[0]}/ on "
        f"another machine, put both into one folder, and give FOLDER/{WEIGHTS} instead; a mirror "
        "is set by HF_ENDPOINT",
    )


def _is_of_disk(error: OSError) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError, socket.gaierror)):
        return False
    is_certificate = error.errno == errno.ENOENT and error.filename is None  # SSL_CERT_FILE
    return not is_certificate and error.errno not in (None, *UNREACHABLE)


def _is_unreachable(hub: ModuleType, error: Exception) -> bool:
    if isinstance(error, hub.errors.HfHubHTTPError):
        status = _status(error)
        return status is not None and (status in (*TEMPORARY, 407) or status >= 500)
    return isinstance(error, (hub.errors.HTTPError, OSError))


def _status(error: Exception) -> int | None:
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _reason(hub: ModuleType, error: Exception) -> str:
    text = getattr(error, "server_message", None) or describe_error(error)
    status = _status(error)
    line = redact_urls(text.splitlines()[0][:300])
    if token := hub.get_token():
        line = line.replace(token, HIDDEN)
    line = _TOKEN.sub(HIDDEN, line)
    return f"HTTP {status}: {line}" if status is not None and str(status) not in line else line


def hub_package() -> ModuleType:
    """Import huggingface_hub, else raise UsageError."""
    names = ("huggingface_hub.constants", "huggingface_hub.errors", "huggingface_hub.utils")
    for name in names:
        import_package(name, "huggingface_hub", "safetensors")
    return sys.modules["huggingface_hub"]


def endpoint(hub: ModuleType) -> str:
    """Return the Hub's address: `HF_ENDPOINT` as it is now, not as it was at the import."""
    default: str = hub.constants.ENDPOINT
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or default


@contextlib.contextmanager
def no_progress_bars(hub: ModuleType) -> Iterator[None]:
    """Turn off huggingface_hub's progress bars and its warning of a full disk, an error later."""
    was_enabled = not hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Not enough free disk space")
            yield
    finally:
        if was_enabled:
            hub.utils.enable_progress_bars()
