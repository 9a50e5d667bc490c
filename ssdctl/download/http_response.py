"""What an HTTP reply means for a pinned file: which bytes it brings, or why it is refused."""

from __future__ import annotations

import datetime
import email.utils
import re

import requests

from ssdctl._version import __version__
from ssdctl.errors import IntegrityError, NetworkError
from ssdctl.runtime.redact import redact_url, redact_urls

BUSY = (429, 503)
PASSING = (408, 500, 502, 504)
ABSENT = (403, 404, 410)  # S3 says 403 for what it does not have


class RetryableError(Exception):
    """The server cannot answer now. `wait_s` is the wait it asks for, if it does."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RestartDownload(Exception):  # noqa: N818 - as above
    """The bytes that arrived belong to another file, or ranges do not work here."""

    def __init__(self, validator: str, *, ranges: bool = True) -> None:
        super().__init__(validator)
        self.validator = validator
        self.ranges = ranges


class NotFound(NetworkError):  # noqa: N818 - as above
    """The server has no such file, or does not give it to us."""


def request_headers(wanted: range | None, known_validator: str) -> dict[str, str]:
    """The headers that ask for `wanted` (None: all of it), if the file is still the known one."""
    headers = {"Accept-Encoding": "identity", "User-Agent": f"ssdctl/{__version__}"}
    if wanted is not None:
        headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        if known_validator.startswith('"'):  # a strong ETag; If-Range takes no weak one
            headers["If-Range"] = known_validator
    return headers


def validator(reply: requests.Response) -> str:
    """What the server calls this version of its file: the ETag, else the date, else nothing."""
    headers = reply.headers
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def validate_response(
    reply: requests.Response, wanted: range, num_bytes: int, url: str
) -> range | None:
    """The bytes that follow: a part of `wanted`, or None for the whole file from its start.

    Raises:
        RetryableError: The server is busy or broken for now.
        RestartDownload: It does not do ranges and says so by 416.
        NetworkError: It refuses.
        IntegrityError: What it offers is not the pinned file, or not what was asked for.
    """
    if reply.status_code == 416:
        _check_total(_content_range(reply)[1], num_bytes, url)
        raise RestartDownload(validator(reply), ranges=False)
    _check_status(reply, url)
    if reply.status_code == 200:
        _check_total(_content_length(reply), num_bytes, url)
        return None
    span, total = _content_range(reply)
    _check_total(total, num_bytes, url)
    if span is None or span.start != wanted.start or not wanted.start < span.stop <= wanted.stop:
        raise IntegrityError(
            f"{redact_url(url)}: asked for bytes {wanted.start}-{wanted.stop - 1}, the server "
            f"answers with Content-Range {reply.headers.get('Content-Range')!r}",
            hint="its answers cannot be trusted: try --mirror",
        )
    return span


def total_bytes(reply: requests.Response, url: str) -> int:
    """The length of the whole file, by a reply to a range request.

    Raises:
        RetryableError: The server is busy or broken for now.
        NetworkError: It refuses, or does not say.
        IntegrityError: It answers with a page.
    """
    _check_status(reply, url)
    total = _content_length(reply) if reply.status_code == 200 else _content_range(reply)[1]
    if not total:
        raise NetworkError(f"{redact_url(url)}: the server does not say how long the file is")
    return total


def _check_status(reply: requests.Response, url: str) -> None:
    status = reply.status_code
    said = f"{status} {reply.reason or ''}".strip()
    if status in BUSY:
        raise RetryableError(f"the server is busy: {said}", _retry_after_s(reply))
    if status in PASSING:
        raise RetryableError(f"the server answers {said}")
    if status in ABSENT:
        raise NotFound(
            f"{redact_url(url)}: the server answers {said}", hint="check the URL, or try --mirror"
        )
    if status not in (200, 206):
        raise NetworkError(f"{redact_url(url)}: the server answers {said}", hint="try --mirror")
    kind = reply.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() in ("text/html", "application/xhtml+xml"):
        raise IntegrityError(
            f"{redact_url(url)}: the server answers with a page (Content-Type: {kind}), not with "
            "the file",
            hint="a login page of the network, perhaps: open the URL in a browser, or try --mirror",
        )


def _check_total(total: int | None, num_bytes: int, url: str) -> None:
    if total is not None and total != num_bytes:
        raise IntegrityError(
            f"{redact_url(url)}: the server's file has {total:,} bytes, the pinned one "
            f"{num_bytes:,}",
            hint="the file there is another one: try --mirror, or correct the manifest",
        )


def _content_length(reply: requests.Response) -> int | None:
    text = reply.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _content_range(reply: requests.Response) -> tuple[range | None, int | None]:
    """(the bytes, the whole file's length) of a Content-Range header, None where it says none."""
    text = reply.headers.get("Content-Range", "").strip()
    found = re.fullmatch(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", text)
    if not found:
        return None, None
    first, last, total = found.groups()
    span = range(int(first), int(last) + 1) if first is not None else None
    return span, None if total == "*" else int(total)


def _retry_after_s(reply: requests.Response) -> float | None:
    """The wait that Retry-After asks for: seconds, or a date."""
    text = reply.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.timezone.utc)
    return max((date - datetime.datetime.now(datetime.timezone.utc)).total_seconds(), 0.0)


def explained(error: Exception, url: str) -> str:
    """Why a request failed, in a few words.

    Raises:
        NetworkError: It would fail the same way again.
    """
    reason: object = error
    while isinstance(reason, BaseException):
        inner = getattr(reason, "reason", None) or (reason.args[0] if reason.args else None)
        if not isinstance(inner, BaseException):
            break
        reason = inner
    message = redact_urls(str(reason)) or type(error).__name__
    message = re.sub(r"^\w+\(host=.*?\): ", "", message)  # urllib3 names its own objects
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "behind a proxy with a certificate of its own, set REQUESTS_CA_BUNDLE to its CA file"
        raise NetworkError(f"{redact_url(url)}: {message}", hint=hint) from error
    broken_for_good = (
        requests.TooManyRedirects,
        requests.exceptions.InvalidSchema,
        requests.exceptions.InvalidURL,
        requests.exceptions.MissingSchema,
        requests.exceptions.InvalidHeader,
        requests.exceptions.InvalidProxyURL,
    )
    if isinstance(error, broken_for_good):
        raise NetworkError(
            f"{redact_url(url)}: {message}", hint="check the URL, or try --mirror"
        ) from error
    return message
