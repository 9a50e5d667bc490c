"""Transfer one file over HTTP into its `Part`, with several connections and retries.

A single worker starts. Once the server has answered with the requested range, the others start; a
server that ignores ranges keeps the one worker. Workers are daemon threads: the caller's thread
watches them, so that even a name look-up that never returns ends at the deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import NamedTuple

import requests
import urllib3

from ssdctl.download import http_response
from ssdctl.download.partial_file import Part
from ssdctl.download.retry import RetryableError, RetryPolicy
from ssdctl.errors import IntegrityError, NetworkError
from ssdctl.runtime.background import run_in_daemon_thread
from ssdctl.runtime.redact import redact_url

CHUNK_BYTES = 64 * 1024
TICK_S = 0.1
SYNC_S = 10.0

# Label, bytes done, bytes in total. Called a few times a second, by one thread.
Report = Callable[[str, int, int], None]


HTTP_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError)


class _Halted(Exception):  # noqa: N818 - not an error for the user
    """Raised to stop a worker after the transfer was cancelled."""


class Order(NamedTuple):
    """One file to transfer.

    Attributes:
        session: Shared by the connections.
        url: The file's address.
        label: Its name in progress reports.
        connections: How many at once, if the server supports ranges.
        retry_policy: Timeouts and retries.
        report: Called with the progress.
    """

    session: requests.Session
    url: str
    label: str
    connections: int
    retry_policy: RetryPolicy
    report: Report


def transfer(order: Order, part: Part) -> None:
    """Fetch the missing bytes of `part`.

    Raises:
        NetworkError: The server refuses, stalls or fails repeatedly. Received bytes are kept.
        IntegrityError: The server offers another file than the pinned one.
        DiskError: The part cannot be written.
    """
    ranges = True
    restarts = order.retry_policy.restarts
    for restart in range(restarts + 1):
        # Servers behind one name may give the same file different validators. So the last attempt
        # ignores them: the hash decides.
        attempt = _Attempt(order, part, ranges, watch_version=restart < restarts)
        try:
            attempt.run()
            return
        except http_response.RestartDownload as change:
            ranges = ranges and change.ranges
            part.reset(change.validator)
    raise NetworkError(
        f"{redact_url(order.url)}: started from zero {restarts} times: the file keeps changing, or "
        "the server ignores ranges and its connections keep breaking",
        hint="try --mirror, or fetch the file by other means",
    )


class _Attempt:
    """One attempt at a file, with one set of workers, until it is complete or must restart."""

    def __init__(self, order: Order, part: Part, ranges: bool, watch_version: bool) -> None:
        self.order, self.part = order, part
        self.url, self.retry_policy = order.url, order.retry_policy
        self.ranges, self.watch_version = ranges, watch_version
        self.lock = threading.Condition()  # guards all below, and the part
        self.taken: set[int] = set()
        self.threads: list[threading.Thread] = []
        self.open_replies: set[requests.Response] = set()
        self.received_bytes = 0
        self.active = 0
        self.waiting = 0
        self.contacted = False
        self.may_spread = False
        self.over = False
        self.failure: BaseException | None = None
        # Used only by the caller's thread
        self.mark_bytes = 0
        self.mark = self.synced = time.monotonic()

    # The caller's thread

    def run(self) -> None:
        # Before the first byte of this attempt: what an earlier run downloaded.
        self.order.report(self.order.label, self.part.arrived_bytes, self.part.num_bytes)
        try:
            self._add_worker()
            while True:
                with self.lock:
                    if self.active and self.failure is None and not self._should_spread():
                        self.lock.wait(TICK_S)
                    failure, active, spread = self.failure, self.active, self._should_spread()
                if failure is not None:
                    raise failure
                if not active:
                    break
                if spread:
                    for _ in range(min(self.order.connections, len(self.part.pending())) - 1):
                        self._add_worker()
                    self.may_spread = False
                self._watch()
        finally:
            self._end()
        self.order.report(self.order.label, self.part.num_bytes, self.part.num_bytes)

    def _should_spread(self) -> bool:
        return self.may_spread and len(self.threads) == 1 and self.order.connections > 1

    def _add_worker(self) -> None:
        thread = threading.Thread(target=self._work, name=f"fetch {self.order.label}", daemon=True)
        with self.lock:
            self.active += 1
            self.threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        """Report the progress, sync the received bytes, and check the deadline."""
        now = time.monotonic()
        with self.lock:
            received, waiting = self.received_bytes, self.waiting
            arrived = self.part.arrived_bytes
        self.order.report(self.order.label, arrived, self.part.num_bytes)
        if now - self.synced > SYNC_S:
            self.part.sync()
            self.synced = now = time.monotonic()
        enough = self.retry_policy.min_rate * self.retry_policy.stall_s
        if waiting or received - self.mark_bytes >= enough:
            self.mark, self.mark_bytes = now, received
        elif now - self.mark > self.retry_policy.stall_s:
            raise NetworkError(
                f"{redact_url(self.url)}: {received - self.mark_bytes} bytes in the last "
                f"{self.retry_policy.stall_s:g} s: stalled",
                hint="received bytes are kept: run it again to continue, or try --mirror",
            )

    def _end(self) -> None:
        with self.lock:
            self.over = True
            self.lock.notify_all()
            for reply in self.open_replies:
                # Stops a worker that waits for bytes. One that waits for a response's headers, or
                # for a name look-up, ends by its timeout and changes nothing any more.
                with contextlib.suppress(Exception):
                    reply.raw.shutdown()
        deadline = time.monotonic() + 1
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))

    # The workers

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            while (piece := self._take()) is not None:
                self._fetch(piece)
        except _Halted:
            pass
        except BaseException as error:
            failure = error
        with self.lock:
            self.active -= 1
            self.failure = self.failure or failure
            self.lock.notify_all()

    def _take(self) -> int | None:
        with self.lock:
            if self.over:
                return None
            piece = next((p for p in self.part.pending() if p not in self.taken), None)
            if piece is not None:
                self.taken.add(piece)
            return piece

    def _fetch(self, piece: int) -> None:
        """Request a piece until it is complete."""
        failures = 0
        while wanted := self._missing(piece):
            problem, requested_s = "the server closed the connection without a byte", None
            try:
                self._request(wanted)
            except RetryableError as error:
                problem, requested_s = str(error), error.wait_s
            except HTTP_ERRORS as error:
                problem = http_response.describe_error(error, self.url)
            left = self._missing(piece)
            if len(left) < len(wanted):
                failures = 0
                continue
            failures += 1
            limit = self.retry_policy.retries if self.contacted else self.retry_policy.first_retries
            if failures > limit:
                raise NetworkError(
                    f"{redact_url(self.url)}: {problem} (tried {failures} times)",
                    hint="received bytes are kept: run it again to continue. Proxies are those of "
                    "HTTPS_PROXY and HTTP_PROXY; --mirror fetches from elsewhere",
                )
            self._pause(self.retry_policy.wait_s(failures, requested_s))

    def _missing(self, piece: int) -> range:
        with self.lock:
            if self.over:
                raise _Halted
            return self.part.missing(piece)

    def _pause(self, seconds: float) -> None:
        with self.lock:
            self.waiting += 1
            self.lock.wait_for(lambda: self.over, seconds)
            self.waiting -= 1

    def _request(self, wanted: range) -> None:
        """Send one request for `wanted` and write what is received."""
        known = self.part.validator if self.watch_version else ""
        headers = http_response.request_headers(wanted if self.ranges else None, known)
        with _get(self.order.session, self.url, headers, self.retry_policy) as reply:
            with self.lock:
                self.contacted = True
                self.open_replies.add(reply)
            try:
                span = self._accepted(reply, wanted)
                self._store(reply, span)
            finally:
                with self.lock:
                    self.open_replies.discard(reply)

    def _accepted(self, reply: requests.Response, wanted: range) -> range:
        """Return the bytes that this response contains, by its headers."""
        validator = http_response.validator(reply)
        span = http_response.validate_response(reply, wanted, self.part.num_bytes, self.url)
        with self.lock:
            if self.over:
                raise _Halted
            known = self.part.validator
            if span is None:  # the whole file, regardless of the requested range
                if self.part.arrived_bytes or len(self.threads) > 1:
                    raise http_response.RestartDownload(validator, ranges=self.ranges)
                self.part.adopt(validator)
                return range(self.part.num_bytes)
            if known and validator and validator != known and self.watch_version:
                raise http_response.RestartDownload(validator)
            if validator and not known:
                self.part.adopt(validator)
            self.may_spread = True
            self.lock.notify_all()
            return span

    def _store(self, reply: requests.Response, span: range) -> None:
        offset = span.start
        while data := reply.raw.read1(CHUNK_BYTES, decode_content=False):
            if offset + len(data) > span.stop:
                raise IntegrityError(
                    f"{redact_url(self.url)}: the server sends more than the {len(span)} bytes it "
                    "was expected to",
                    hint="the server has another file: try --mirror",
                )
            with self.lock:
                if self.over:
                    raise _Halted
                self.part.write(offset, data)
                self.received_bytes += len(data)
            offset += len(data)


def _get(
    session: requests.Session, url: str, headers: dict[str, str], retry_policy: RetryPolicy
) -> requests.Response:
    """Send one GET request; the response's body is not read yet."""
    timeout = (retry_policy.connect_s, retry_policy.read_s)
    try:
        return session.get(url, headers=headers, stream=True, timeout=timeout)
    except HTTP_ERRORS:
        raise
    except OSError as error:  # requests looks for the file of certificates first
        raise NetworkError(
            f"{redact_url(url)}: {error}", hint="correct or unset REQUESTS_CA_BUNDLE"
        ) from error


def length_of(session: requests.Session, url: str, retry_policy: RetryPolicy) -> int:
    """Request the size of the file in bytes.

    Raises:
        NetworkError: It does not answer in time, refuses, or does not state the size.
        IntegrityError: It answers with a web page.
    """
    failures = 0
    contacted = False

    def request() -> int:
        nonlocal contacted
        with _get(session, url, http_response.request_headers(range(1), ""), retry_policy) as reply:
            contacted = True
            return http_response.total_bytes(reply, url)

    while True:
        try:
            return _in_time(request, retry_policy.stall_s, url)
        except RetryableError as error:
            problem, requested_s = str(error), error.wait_s
        except HTTP_ERRORS as error:
            problem, requested_s = http_response.describe_error(error, url), None
        failures += 1
        if failures > (retry_policy.retries if contacted else retry_policy.first_retries):
            tried = f" (tried {failures} times)" if failures > 1 else ""
            raise NetworkError(f"{redact_url(url)}: {problem}{tried}")
        time.sleep(retry_policy.wait_s(failures, requested_s))


def _in_time(work: Callable[[], int], seconds: float, url: str) -> int:
    """Return or raise the result of `work`, if it ends in time."""
    result = run_in_daemon_thread(work)
    if not wait([result], seconds).done:
        raise NetworkError(
            f"{redact_url(url)}: no answer within {seconds:g} s", hint="try --mirror"
        )
    return result.result()
