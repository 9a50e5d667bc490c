"""HTTP for downloads: sessions, requests that are tried again, headers, errors in words.

The environment sets proxies and CA bundles (HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE).
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from ssdctl._version import __version__
from ssdctl.errors import NetworkError
from ssdctl.runtime.safe_text import redact_url, redact_urls
from ssdctl.runtime.system import run_in_daemon_thread

MAX_REDIRECTS = 10
TEMPORARY = (408, 429, 500, 502, 503, 504)
TICK_S = 0.1  # between two looks at a deadline
ABSENT = (403, 404, 410)  # S3 answers 403 for a missing file
RESUME = "received bytes are kept: run it again to continue"
MIRROR = "--set download.mirror=URL"  # which every command has
T = TypeVar("T")


class RetryPolicy(NamedTuple):
    connect_s: float = 10.0
    read_s: float = 15.0  # for the next byte on one connection; then it is opened again
    stall_s: float = 30.0  # less than `min_rate` on average over this time is a failure
    min_rate: float = 1024.0  # bytes per second, all connections together
    retries: int = 5  # after failures in a row without a byte in between
    connect_retries: int = 2  # after a refused connection (no network, wrong name)
    backoff_s: float = 0.5  # delay after the first failure; doubles with each
    longest_wait_s: float = 60.0  # also for Retry-After
    restarts: int = 3  # from zero, if there are no ranges


class NotFound(NetworkError):  # noqa: N818 - not an error for the user
    """The server does not have the file, or denies access to it."""


class TemporaryFailure(NetworkError):  # noqa: N818 - it is tried again
    """A failure after which the same request may succeed."""

    asked_s: float = 0.0  # the server asked to wait so long
    is_connect = False  # no connection could be made


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
            raise requests.exceptions.InvalidSchema(
                f"refused a redirect from HTTPS to HTTP ({destination})"
            )
        return target


def open_session(connections: int) -> requests.Session:
    """Open a session that follows redirects to http(s) only, through the environment's proxies."""
    session = _Session()
    session.max_redirects = MAX_REDIRECTS
    for scheme in ("http://", "https://"):  # without other adapters, no redirect leads elsewhere
        session.mount(scheme, HTTPAdapter(pool_maxsize=connections))
    return session


def retry(
    request: Callable[[], T], policy: RetryPolicy, pause: Callable[[float, bool], object]
) -> T:
    """Return what `request` returns; call it again after each `TemporaryFailure`.

    `pause` waits so many seconds between two calls, with True if the server asked for it.
    """
    for failures in itertools.count(1):
        try:
            return request()
        except TemporaryFailure as error:
            if failures > (policy.connect_retries if error.is_connect else policy.retries):
                tried = f" (tried {failures} times)" if failures > 1 else ""
                raise NetworkError(f"{error}{tried}", hint=error.hint) from error
            wait_s = error.asked_s or policy.backoff_s * 2 ** (failures - 1)
            pause(min(wait_s, policy.longest_wait_s), error.asked_s > 0)
    raise AssertionError


def get(
    session: requests.Session,
    url: str,
    wanted: range | None,
    policy: RetryPolicy,
    num_bytes: int | None = None,
) -> requests.Response:
    """Request `wanted` bytes (None: all) of a file of `num_bytes`; the body is not read yet.

    NetworkError: the server refuses, cannot be reached, or sends a web page of another size.
    """
    try:
        reply = session.get(
            url,
            headers=request_headers(wanted),
            stream=True,
            timeout=(policy.connect_s, policy.read_s),
        )
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise _request_error(error, url) from error
    if (problem := _refusal(reply, url, num_bytes)) is not None:
        reply.close()
        raise problem
    return reply


def length_of(url: str, policy: RetryPolicy) -> int:
    """Request the size of the file in bytes; NetworkError if the server does not state it."""
    deadline = time.monotonic() + policy.stall_s

    def pause(seconds: float, is_asked: bool) -> None:
        nonlocal deadline
        deadline += seconds * is_asked
        time.sleep(seconds)

    def request() -> int | None:
        with open_session(1) as session, get(session, url, range(1), policy) as reply:
            return length_and_range(reply)[0]

    result = run_in_daemon_thread(lambda: retry(request, policy, pause))
    while not wait([result], TICK_S).done:
        if time.monotonic() > deadline:
            raise NetworkError(
                f"{redact_url(url)}: no answer within {policy.stall_s:g} s", hint=f"try {MIRROR}"
            )
    if not (total := result.result()):
        raise NetworkError(f"{redact_url(url)}: the server does not state the length of the file")
    return total


def request_headers(wanted: range | None) -> dict[str, str]:
    """Return the headers that request `wanted` bytes (None: all)."""
    headers = {"Accept-Encoding": "identity", "User-Agent": f"ssdctl/{__version__}"}
    if wanted is not None:
        headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
    return headers


def length_and_range(reply: requests.Response) -> tuple[int | None, range | None]:
    """Return the file's length and the bytes of it in a response, None if it does not say so."""
    if reply.status_code == 200:
        length = reply.headers.get("Content-Length", "")
        return (int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None), None
    text = reply.headers.get("Content-Range", "").strip()
    match = re.fullmatch(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", text)
    if not match:
        return None, None
    first, last, total = match.groups()
    span = range(int(first), int(last) + 1) if first is not None else None
    return None if total == "*" else int(total), span


def _refusal(reply: requests.Response, url: str, num_bytes: int | None) -> NetworkError | None:
    """Return the reason to refuse a response; None if it has the file or a part of it."""
    status = reply.status_code
    message = f"{redact_url(url)}: the server answers {status} {reply.reason or ''}".rstrip()
    if status in ABSENT:
        return NotFound(message, hint=f"check the URL, or try {MIRROR}")
    if status in TEMPORARY:
        busy = TemporaryFailure(message, hint=f"try again later, or try {MIRROR}")
        with contextlib.suppress(urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            busy.asked_s = urllib3.Retry().get_retry_after(reply.raw) or 0
        return busy
    if status not in (200, 206, 416):
        login = "check the URL and the credentials (~/.netrc; HTTPS_PROXY and HTTP_PROXY)"
        hint = "try again later" if status >= 500 else login
        return NetworkError(message, hint=f"{hint}, or try {MIRROR}")
    kind = reply.headers.get("Content-Type", "")
    is_page = kind.partition(";")[0].strip().lower() == "text/html"
    if status == 416 or not is_page or (num_bytes and length_and_range(reply)[0] == num_bytes):
        return None
    return NotFound(
        f"{redact_url(url)}: the server answers with a page (Content-Type: {kind}), not with the "
        "file",
        hint=f"perhaps a login page of the network: open the URL in a browser, or try {MIRROR}",
    )


def _request_error(error: Exception, url: str) -> NetworkError:
    message = f"{redact_url(url)}: {describe_error(error)}"
    is_ours = isinstance(error, (requests.RequestException, urllib3.exceptions.HTTPError))
    if not is_ours or "CERTIFICATE_VERIFY_FAILED" in str(error):  # requests looks for the file
        return NetworkError(
            message,
            hint="REQUESTS_CA_BUNDLE must name the CA file of a proxy with its own certificate; "
            "otherwise unset it",
        )
    if isinstance(error, (requests.TooManyRedirects, ValueError)):  # an invalid URL or header
        return NetworkError(message, hint=f"check the URL, or try {MIRROR}")
    failure = TemporaryFailure(
        message,
        hint=f"{RESUME}. HTTPS_PROXY and HTTP_PROXY set proxies, {MIRROR} another source",
    )
    failure.is_connect = isinstance(error, requests.ConnectionError) and not isinstance(
        next(iter(error.args), None), urllib3.exceptions.ProtocolError
    )
    return failure


def describe_error(error: Exception) -> str:
    """Return why a request failed, in a few words: the innermost reason, without secrets."""
    reason, contexts = error, []
    while True:
        parts = [getattr(reason, "reason", None), *reason.args]
        inner = next((part for part in parts if isinstance(part, Exception)), None)
        if inner is None:
            break
        if len(reason.args) > 1 and isinstance(reason.args[0], str):  # ("Connection aborted.", ...)
            contexts.append(reason.args[0].rstrip("."))
        reason = inner
    message = redact_urls(str(reason)).strip() or type(reason).__name__
    message = re.sub(r"^\w+\(host=.*?\): ", "", message)  # urllib3 prints its own objects
    return ": ".join([*contexts, message])
