"""Check an HTTP response for a pinned file: which bytes it contains, or why it is refused."""

from __future__ import annotations

import datetime
import email.utils
import re

import requests

from ssdctl._version import __version__
from ssdctl.download.retry import RetryableError
from ssdctl.errors import IntegrityError, NetworkError
from ssdctl.runtime.redact import redact_url, redact_urls

BUSY = (429, 503)
TEMPORARY = (408, 500, 502, 504)
ABSENT = (403, 404, 410)  # S3 answers 403 for a missing file


class RestartDownload(Exception):  # noqa: N818 - not an error for the user
    """The received bytes belong to another file, or ranges do not work on this server."""

    def __init__(self, validator: str, *, ranges: bool = True) -> None:
        super().__init__(validator)
        self.validator = validator
        self.ranges = ranges


class NotFound(NetworkError):  # noqa: N818 - not an error for the user
    """The server does not have the file, or denies access to it."""


def request_headers(wanted: range | None, known_validator: str) -> dict[str, str]:
    """Return the headers that request `wanted` (None: all) of the known version."""
    headers = {"Accept-Encoding": "identity", "User-Agent": f"ssdctl/{__version__}"}
    if wanted is not None:
        headers["Range"] = f"bytes={wanted.start}-{wanted.stop - 1}"
        if known_validator.startswith('"'):  # a strong ETag; If-Range accepts no weak one
            headers["If-Range"] = known_validator
    return headers


def validator(reply: requests.Response) -> str:
    """Return the server's name of this version of the file: the ETag, the date, or nothing."""
    headers = reply.headers
    return str(headers.get("ETag") or headers.get("Last-Modified") or "")


def validate_response(
    reply: requests.Response, wanted: range, num_bytes: int, url: str
) -> range | None:
    """Return the bytes that follow: a part of `wanted`, or None for the file from its start.

    Raises:
        RetryableError: The server is busy or broken for now.
        RestartDownload: It does not support ranges (status 416).
        NetworkError: It refuses.
        IntegrityError: It offers another file than the pinned one, or another range.
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
            hint="the server is unreliable: try --mirror",
        )
    return span


def total_bytes(reply: requests.Response, url: str) -> int:
    """Return the length of the file, by a response to a range request.

    Raises:
        RetryableError: The server is busy or broken for now.
        NetworkError: It refuses, or does not state the length.
        IntegrityError: It answers with a web page.
    """
    _check_status(reply, url)
    total = _content_length(reply) if reply.status_code == 200 else _content_range(reply)[1]
    if not total:
        raise NetworkError(f"{redact_url(url)}: the server does not state the length of the file")
    return total


def _check_status(reply: requests.Response, url: str) -> None:
    status = reply.status_code
    answer = f"{status} {reply.reason or ''}".strip()
    if status in BUSY:
        raise RetryableError(f"the server is busy: {answer}", _retry_after_s(reply))
    if status in TEMPORARY:
        raise RetryableError(f"the server answers {answer}")
    if status in ABSENT:
        raise NotFound(
            f"{redact_url(url)}: the server answers {answer}", hint="check the URL, or try --mirror"
        )
    if status not in (200, 206):
        raise NetworkError(f"{redact_url(url)}: the server answers {answer}", hint="try --mirror")
    kind = reply.headers.get("Content-Type", "")
    if kind.partition(";")[0].strip().lower() in ("text/html", "application/xhtml+xml"):
        raise IntegrityError(
            f"{redact_url(url)}: the server answers with a page (Content-Type: {kind}), not with "
            "the file",
            hint="perhaps a login page of the network: open the URL in a browser, or try --mirror",
        )


def _check_total(total: int | None, num_bytes: int, url: str) -> None:
    if total is not None and total != num_bytes:
        raise IntegrityError(
            f"{redact_url(url)}: the server's file has {total:,} bytes, the pinned one "
            f"{num_bytes:,}",
            hint="the server has another file: try --mirror, or correct the manifest",
        )


def _content_length(reply: requests.Response) -> int | None:
    text = reply.headers.get("Content-Length", "")
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def _content_range(reply: requests.Response) -> tuple[range | None, int | None]:
    """Return (the bytes, the file's length) of a Content-Range header, None if it has none."""
    text = reply.headers.get("Content-Range", "").strip()
    match = re.fullmatch(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18}|\*)", text)
    if not match:
        return None, None
    first, last, total = match.groups()
    span = range(int(first), int(last) + 1) if first is not None else None
    return span, None if total == "*" else int(total)


def _retry_after_s(reply: requests.Response) -> float | None:
    """Return the delay that Retry-After requests: seconds, or until a date."""
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


def describe_error(error: Exception, url: str) -> str:
    """Return why a request failed, in a few words.

    Raises:
        NetworkError: It would fail the same way again.
    """
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
    message = ": ".join([*contexts, message])
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "behind a proxy with a certificate of its own, set REQUESTS_CA_BUNDLE to its CA file"
        raise NetworkError(f"{redact_url(url)}: {message}", hint=hint) from error
    permanent = (
        requests.TooManyRedirects,
        requests.exceptions.InvalidSchema,
        requests.exceptions.InvalidURL,
        requests.exceptions.MissingSchema,
        requests.exceptions.InvalidHeader,
        requests.exceptions.InvalidProxyURL,
    )
    if isinstance(error, permanent):
        raise NetworkError(
            f"{redact_url(url)}: {message}", hint="check the URL, or try --mirror"
        ) from error
    return message
