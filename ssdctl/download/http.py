"""HTTP for downloads: sessions, retries, the headers of a response, errors in words.

Proxies and CA bundles are those of the environment (HTTPS_PROXY, NO_PROXY, REQUESTS_CA_BUNDLE).
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter

from ssdctl._version import __version__
from ssdctl.errors import IntegrityError, NetworkError, SsdctlError
from ssdctl.runtime.safe_text import HIDDEN, redact_url, redact_urls

MAX_REDIRECTS = 10
TEMPORARY = (408, 429, 500, 502, 503, 504)
ABSENT = (403, 404, 410)  # S3 answers 403 for a missing file
PERMANENT = (requests.TooManyRedirects, ValueError)  # also: an invalid URL, header or proxy


class RetryPolicy(NamedTuple):
    """Timeouts and retries."""

    connect_s: float = 10.0
    read_s: float = 15.0  # for the next byte on one connection; then it is opened again
    stall_s: float = 30.0  # less than `min_rate` on average over this time is a failure
    min_rate: float = 1024.0  # bytes per second, all connections together
    retries: int = 5  # also failures in a row without a byte in between
    connect_retries: int = 2  # after a refused connection (no network, wrong name)
    backoff_s: float = 0.5  # delay after the second failure; doubles with each
    longest_wait_s: float = 60.0  # also for Retry-After
    restarts: int = 3  # from zero: the file changed, or there are no ranges


class NotFound(NetworkError):  # noqa: N818 - not an error for the user
    """The server does not have the file, or denies access to it."""


_thread = threading.local()  # is_sending: whether it is sending a request of this module


class _WithoutQueries(logging.Filter):
    """Hides the queries of our URLs in urllib3's warnings, which any program's handlers may get."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(_thread, "is_sending", False):
            message = re.sub(r"\?[^\s'\")]+", f"?{HIDDEN}", record.getMessage())
            record.msg, record.args = redact_urls(message), ()
        return True


for _name in ("connection", "connectionpool", "util.retry"):
    logging.getLogger(f"urllib3.{_name}").addFilter(_WithoutQueries())


class _Session(requests.Session):
    """Refuses redirects from HTTPS to HTTP."""

    def send(self, request: requests.PreparedRequest, **how: Any) -> requests.Response:
        was_sending = getattr(_thread, "is_sending", False)  # a redirect is sent from within
        _thread.is_sending = True
        try:
            return super().send(request, **how)
        finally:
            _thread.is_sending = was_sending

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


class _Retry(urllib3.Retry):
    """Waits by `pause(seconds, is_asked)`, at most `backoff_max` seconds even if it is asked to."""

    pause: Callable[[float, bool], object]

    def new(self, **changes: Any) -> _Retry:
        retry = super().new(**changes)
        retry.pause = self.pause
        return retry

    def sleep(self, response: urllib3.BaseHTTPResponse | None = None) -> None:
        try:
            asked = self.get_retry_after(response) if response else None
        except (urllib3.exceptions.InvalidHeader, ValueError, OverflowError):
            asked = None
        self.pause(min(asked or self.get_backoff_time(), self.backoff_max), bool(asked))


def open_session(
    connections: int,
    policy: RetryPolicy | None = None,
    pause: Callable[[float, bool], object] = lambda seconds, _: time.sleep(seconds),
) -> requests.Session:
    """Open a session that follows redirects to http(s) only, through the environment's proxies.

    Without a policy, a request is sent once. `pause` waits so many seconds between two attempts,
    with True if the server asked for it.
    """
    retry = _Retry(0)
    if policy is not None:
        retry = _Retry(
            total=None,
            connect=policy.connect_retries,
            other=policy.connect_retries,
            read=policy.retries,
            status=policy.retries,
            status_forcelist=TEMPORARY,
            raise_on_status=False,
            backoff_factor=policy.backoff_s,
            backoff_max=policy.longest_wait_s,
        )
    retry.pause = pause
    session = _Session()
    session.max_redirects = MAX_REDIRECTS
    for scheme in ("http://", "https://"):  # without other adapters, no redirect leads elsewhere
        session.mount(scheme, HTTPAdapter(pool_maxsize=connections, max_retries=retry))
    return session


def get(
    session: requests.Session, url: str, wanted: range | None, validator: str, policy: RetryPolicy
) -> requests.Response:
    """Request `wanted` bytes (None: all) of a known version; the body is not read yet.

    NetworkError: the server refuses, or fails repeatedly. IntegrityError: it sends a web page.
    """
    headers = request_headers(wanted, validator)
    timeout = (policy.connect_s, policy.read_s)
    try:
        reply = session.get(url, headers=headers, stream=True, timeout=timeout)
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise _request_error(error, url) from error
    except OSError as error:  # requests looks for the file of certificates first
        raise NetworkError(
            f"{redact_url(url)}: {error}", hint="correct or unset REQUESTS_CA_BUNDLE"
        ) from error
    if reply.status_code != 416 and (problem := _refusal(reply, url)) is not None:
        reply.close()
        raise problem
    return reply


def request_headers(wanted: range | None, validator: str = "") -> dict[str, str]:
    """Return the headers that request `wanted` bytes (None: all) of the known version."""
    headers = {"Accept-Encoding": "identity", "User-Agent": f"ssdctl/{__version__}"}
    if wanted is not None:
        headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        if validator.startswith('"'):  # a strong ETag; If-Range accepts no weak one
            headers["If-Range"] = validator
    return headers


def validator_of(reply: requests.Response) -> str:
    """Return the server's name of this version of the file: the ETag, the date, or nothing."""
    headers = reply.headers
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def content_length(reply: requests.Response) -> int | None:
    """Return the declared bytes of the body, None if there is no such header."""
    text = reply.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def content_range(reply: requests.Response) -> tuple[range | None, int | None]:
    """Return (the bytes, the file's length) of a Content-Range header, None if it has none."""
    text = reply.headers.get("Content-Range", "").strip()
    match = re.fullmatch(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", text)
    if not match:
        return None, None
    first, last, total = match.groups()
    span = range(int(first), int(last) + 1) if first is not None else None
    return span, None if total == "*" else int(total)


def _refusal(reply: requests.Response, url: str) -> SsdctlError | None:
    """Return what is wrong with a response; None if its body is the file, or a part of it."""
    status = reply.status_code
    if status not in (200, 206):
        message = f"{redact_url(url)}: the server answers {status} {reply.reason or ''}".rstrip()
        if status in ABSENT:
            return NotFound(message, hint="check the URL, or try --mirror")
        return NetworkError(message, hint="try again later, or try --mirror")
    kind = reply.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() not in ("text/html", "application/xhtml+xml"):
        return None
    return IntegrityError(
        f"{redact_url(url)}: the server answers with a page (Content-Type: {kind}), not with the "
        "file",
        hint="perhaps a login page of the network: open the URL in a browser, or try --mirror",
    )


def _request_error(error: Exception, url: str) -> NetworkError:
    hint = (
        "received bytes are kept: run it again to continue. Proxies are those of HTTPS_PROXY and "
        "HTTP_PROXY; --mirror fetches from elsewhere"
    )
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "behind a proxy with a certificate of its own, set REQUESTS_CA_BUNDLE to its CA file"
    elif isinstance(error, PERMANENT):
        hint = "check the URL, or try --mirror"
    return NetworkError(f"{redact_url(url)}: {describe_error(error)}", hint=hint)


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
