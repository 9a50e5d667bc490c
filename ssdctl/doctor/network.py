"""Whether the download hosts answer with the right files, through the proxies that are set.

A request for one byte of each file, as `download` and `fetch-weights` would make it.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from urllib.parse import urlsplit

from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, OK, CheckResult
from ssdctl.download.backbone_weights import weights_of
from ssdctl.download.fetch import open_session
from ssdctl.download.http_response import NotFound
from ssdctl.download.sources import COCO2017, PinnedFile, weights_named
from ssdctl.download.transfer import Patience, length_of
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.runtime.background import run_in_daemon_thread

PATIENCE = Patience(connect_s=8, read_s=8, stall_s=15, retries=0, first_retries=0)
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
REMEDY = "set HTTPS_PROXY and HTTP_PROXY, or fetch from elsewhere with --mirror URL"


def check_network(config: Config) -> list[CheckResult]:
    """Ask for all files at once."""
    files = dict(COCO2017)
    name = weights_of(config.model)
    if name is not None:
        with contextlib.suppress(UsageError):  # a file of the user's: "data" judges it
            files["weights"] = weights_named(name).file
    asked = [
        run_in_daemon_thread(partial(_ask, part, file, config.download.mirror))
        for part, file in files.items()
    ]
    return [_proxies(), *(answer.result() for answer in asked)]


def _proxies() -> CheckResult:
    """The variables that requests reads; passwords go with all other secrets."""
    known = {
        name: value
        for name in (*PROXIES, *CERTIFICATES)
        if (value := os.environ.get(name.lower()) or os.environ.get(name))
    }
    shown = ", ".join(f"{name}={_without_user(value)}" for name, value in known.items())
    return CheckResult("proxies", OK, shown or "none set")


def _without_user(value: str) -> str:
    """A proxy's address may lack the scheme by which user and password would be found."""
    before, at, host = value.rpartition("@")
    scheme = before.partition("://")[0] + "://" if "://" in before else ""
    return f"{scheme}***@{host}" if at else value


def _ask(part: str, file: PinnedFile, mirror: str | None) -> CheckResult:
    """Whether a file is to be had, of the size that is pinned."""
    start = time.perf_counter()
    try:
        url, num_bytes = _length(file, mirror)
    except SsdctlError as error:
        return CheckResult(part, FAIL, str(error), error.hint or REMEDY)
    host = urlsplit(url).netloc.rpartition("@")[2]
    if file.bytes is not None and num_bytes != file.bytes:
        detail = f"{file.name}: {host} has {num_bytes:,} bytes, expected are {file.bytes:,}"
        return CheckResult(part, FAIL, detail, "the file there is another one: try --mirror")
    spent = time.perf_counter() - start
    detail = f"{file.name}: {host} has its {num_bytes:,} bytes, answered in {spent:.2f} s"
    return CheckResult(part, OK, detail)


def _length(file: PinnedFile, mirror: str | None) -> tuple[str, int]:
    """The URL that has the file, and the bytes that it has there."""
    urls = file.urls(mirror)
    with open_session(1) as session:
        for url in urls[:-1]:
            try:
                return url, length_of(session, url, PATIENCE)
            except NotFound:
                continue
        return urls[-1], length_of(session, urls[-1], PATIENCE)
