"""Check that the download hosts serve the right files, through the proxies that are set.

One byte of each file is requested in the same way as `download` and `fetch-weights` do.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from urllib.parse import urlsplit

from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, OK, CheckResult
from ssdctl.download.fetch import open_session
from ssdctl.download.http_response import NotFound
from ssdctl.download.retry import RetryPolicy
from ssdctl.download.sources import COCO2017, PinnedFile
from ssdctl.download.transfer import length_of
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.model.pretrained import weights_named, weights_of
from ssdctl.runtime.background import run_in_daemon_thread

RETRY_POLICY = RetryPolicy(connect_s=8, read_s=8, stall_s=15, retries=0, first_retries=0)
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
REMEDY = "set HTTPS_PROXY and HTTP_PROXY, or fetch from elsewhere with --mirror URL"


def check_network(config: Config) -> list[CheckResult]:
    """Request all files in parallel."""
    files = dict(COCO2017)
    name = weights_of(config.model)
    if name is not None:
        with contextlib.suppress(UsageError):  # a file of the user: checked by data.py
            files["weights"] = weights_named(name).file
    results = [
        run_in_daemon_thread(partial(_check_file, part, file, config.download.mirror))
        for part, file in files.items()
    ]
    return [_proxies(), *(result.result() for result in results)]


def _proxies() -> CheckResult:
    """Return the variables that requests reads; passwords are redacted later."""
    variables = {
        name: value
        for name in (*PROXIES, *CERTIFICATES)
        if (value := os.environ.get(name.lower()) or os.environ.get(name))
    }
    detail = ", ".join(f"{name}={_without_user(value)}" for name, value in variables.items())
    return CheckResult("proxies", OK, detail or "none set")


def _without_user(value: str) -> str:
    """Remove user and password from a proxy address, which may have no scheme."""
    before, at, host = value.rpartition("@")
    scheme = before.partition("://")[0] + "://" if "://" in before else ""
    return f"{scheme}***@{host}" if at else value


def _check_file(part: str, file: PinnedFile, mirror: str | None) -> CheckResult:
    """Check that a file is available with its pinned size."""
    start = time.perf_counter()
    try:
        url, num_bytes = _length(file, mirror)
    except SsdctlError as error:
        return CheckResult(part, FAIL, str(error), error.hint or REMEDY)
    host = urlsplit(url).netloc.rpartition("@")[2]
    if file.bytes is not None and num_bytes != file.bytes:
        detail = f"{file.name}: {host} has {num_bytes:,} bytes, expected are {file.bytes:,}"
        return CheckResult(part, FAIL, detail, "the host serves a different file: try --mirror")
    spent = time.perf_counter() - start
    detail = f"{file.name}: {host} has its {num_bytes:,} bytes, answered in {spent:.2f} s"
    return CheckResult(part, OK, detail)


def _length(file: PinnedFile, mirror: str | None) -> tuple[str, int]:
    """Return the first URL that has the file, and its size there in bytes."""
    urls = file.urls(mirror)
    with open_session(1) as session:
        for url in urls[:-1]:
            try:
                return url, length_of(session, url, RETRY_POLICY)
            except NotFound:
                continue
        return urls[-1], length_of(session, urls[-1], RETRY_POLICY)
