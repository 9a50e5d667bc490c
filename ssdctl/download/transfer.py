"""The bytes of one file over HTTP into its `Part`, from several connections, whatever happens.

One worker starts alone. When the server has answered it with the range it asked for, the others
join; a server that ignores ranges keeps the one worker. Workers are daemon threads: the caller's
thread watches them, so that even a name look-up that never returns ends at the deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import requests
import urllib3

from ssdctl.download import http_response
from ssdctl.download.partial_file import Part
from ssdctl.errors import IntegrityError, NetworkError
from ssdctl.runtime.redact import redact_url

CHUNK_BYTES = 64 * 1024
TICK_S = 0.1
SYNC_S = 10.0

# What is being done, bytes done, bytes in all. Called a few times a second, by one thread.
Report = Callable[[str, int, int], None]


class Patience(NamedTuple):
    """How long to wait for what.

    Attributes:
        connect_s: For a connection.
        read_s: For the next byte on one connection; then it is made anew.
        stall_s: The deadline: less than `min_rate` bytes/s on average over this time is a failure.
        min_rate: Bytes per second, all connections together.
        retries: Failures in a row, without a byte between them, that one connection survives.
        first_retries: The same before the server ever answered (no network, wrong name).
        backoff_s: Wait after the first failure; doubles with each.
        longest_wait_s: The cap on a wait, Retry-After's included.
        restarts: How often a file may start from zero (it changed, or the server has no ranges).
    """

    connect_s: float = 10.0
    read_s: float = 15.0
    stall_s: float = 30.0
    min_rate: float = 1024.0
    retries: int = 5
    first_retries: int = 2
    backoff_s: float = 0.5
    longest_wait_s: float = 60.0
    restarts: int = 3

    def wait_s(self, failures: int, asked_s: float | None) -> float:
        """How long to wait after so many failures; `asked_s` is the server's wish."""
        wanted = self.backoff_s * 2 ** (failures - 1) if asked_s is None else asked_s
        return min(wanted, self.longest_wait_s)


HTTP_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError)


class _Halted(Exception):  # noqa: N818 - never reaches a user, as those of replies.py
    """The attempt is over; the worker goes home."""


class Order(NamedTuple):
    """What to fetch from where, and how.

    Attributes:
        session: Shared by the connections.
        url: The file's address.
        label: What the report calls it.
        connections: How many at once, where the server gives ranges.
        patience: Timeouts and retries.
        report: Gets the progress.
    """

    session: requests.Session
    url: str
    label: str
    connections: int
    patience: Patience
    report: Report


def transfer(order: Order, part: Part) -> None:
    """Fetch what `part` lacks.

    Raises:
        NetworkError: The server refuses, stalls or breaks off for good. What arrived is kept.
        IntegrityError: The server offers something else than the pinned file.
        DiskError: The part cannot be written.
    """
    ranges = True
    restarts = order.patience.restarts
    for restart in range(restarts + 1):
        # Machines behind one name may call the same file differently. So the last attempt takes
        # what comes: the hash decides.
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
    """One go at a file, with one set of workers, until it is whole or must start from zero."""

    def __init__(self, order: Order, part: Part, ranges: bool, watch_version: bool) -> None:
        self.order, self.part = order, part
        self.url, self.patience = order.url, order.patience
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
        # The caller's thread alone
        self.mark_bytes = 0
        self.mark = self.synced = time.monotonic()

    # The caller's thread

    def run(self) -> None:
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
        """Report, make what arrived durable, and keep the deadline."""
        now = time.monotonic()
        with self.lock:
            received, waiting = self.received_bytes, self.waiting
            arrived = self.part.arrived_bytes
        self.order.report(self.order.label, arrived, self.part.num_bytes)
        if now - self.synced > SYNC_S:
            self.part.sync()
            self.synced = now = time.monotonic()
        enough = self.patience.min_rate * self.patience.stall_s
        if waiting or received - self.mark_bytes >= enough:
            self.mark, self.mark_bytes = now, received
        elif now - self.mark > self.patience.stall_s:
            raise NetworkError(
                f"{redact_url(self.url)}: {received - self.mark_bytes} bytes in the last "
                f"{self.patience.stall_s:g} s: stalled",
                hint="what arrived is kept: run it again to go on, or try --mirror",
            )

    def _end(self) -> None:
        with self.lock:
            self.over = True
            self.lock.notify_all()
            for reply in self.open_replies:
                # Wakes a worker that waits for bytes. One that waits for a reply's head, or for a
                # name, cannot be woken: it ends by its timeout and touches nothing any more.
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
        """Ask for a piece until it is whole."""
        failures = 0
        while wanted := self._missing(piece):
            problem, asked_s = "it closed the connection without a byte", None
            try:
                self._request(wanted)
            except http_response.RetryableError as error:
                problem, asked_s = str(error), error.wait_s
            except HTTP_ERRORS as error:
                problem = http_response.explained(error, self.url)
            left = self._missing(piece)
            if len(left) < len(wanted):
                failures = 0
                continue
            failures += 1
            limit = self.patience.retries if self.contacted else self.patience.first_retries
            if failures > limit:
                raise NetworkError(
                    f"{redact_url(self.url)}: {problem} (tried {failures} times)",
                    hint="what arrived is kept: run it again to go on. Proxies are taken from "
                    "HTTPS_PROXY and HTTP_PROXY; --mirror fetches from elsewhere",
                )
            self._pause(self.patience.wait_s(failures, asked_s))

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
        """One request for `wanted`, written as it comes."""
        known = self.part.validator if self.watch_version else ""
        headers = http_response.request_headers(wanted if self.ranges else None, known)
        with _ask(self.order.session, self.url, headers, self.patience) as reply:
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
        """The bytes that this reply brings, judged by its head."""
        validator = http_response.validator(reply)
        span = http_response.validate_response(reply, wanted, self.part.num_bytes, self.url)
        with self.lock:
            if self.over:
                raise _Halted
            known = self.part.validator
            if span is None:  # the whole file, whatever was asked for
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
                    "was due",
                    hint="the file there is another one: try --mirror",
                )
            with self.lock:
                if self.over:
                    raise _Halted
                self.part.write(offset, data)
                self.received_bytes += len(data)
            offset += len(data)


def _ask(
    session: requests.Session, url: str, headers: dict[str, str], patience: Patience
) -> requests.Response:
    """Send one GET; the reply's body is not read yet."""
    timeout = (patience.connect_s, patience.read_s)
    try:
        return session.get(url, headers=headers, stream=True, timeout=timeout)
    except HTTP_ERRORS:
        raise
    except OSError as error:  # requests looks for the file of certificates first
        raise NetworkError(
            f"{redact_url(url)}: {error}", hint="correct or unset REQUESTS_CA_BUNDLE"
        ) from error


def length_of(session: requests.Session, url: str, patience: Patience) -> int:
    """Ask the server how many bytes the file has.

    Raises:
        NetworkError: It does not answer in time, refuses, or does not say.
        IntegrityError: It answers with a page.
    """
    failures = 0
    contacted = False

    def look() -> int:
        nonlocal contacted
        with _ask(session, url, http_response.request_headers(range(1), ""), patience) as reply:
            contacted = True
            return http_response.total_bytes(reply, url)

    while True:
        try:
            return _in_time(look, patience.stall_s, url)
        except http_response.RetryableError as error:
            problem, asked_s = str(error), error.wait_s
        except HTTP_ERRORS as error:
            problem, asked_s = http_response.explained(error, url), None
        failures += 1
        if failures > (patience.retries if contacted else patience.first_retries):
            tried = f" (tried {failures} times)" if failures > 1 else ""
            raise NetworkError(f"{redact_url(url)}: {problem}{tried}")
        time.sleep(patience.wait_s(failures, asked_s))


def _in_time(look: Callable[[], int], seconds: float, url: str) -> int:
    """What `look` returns or raises, if it does so in time."""
    found: list[int | BaseException] = []

    def work() -> None:
        try:
            found.append(look())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, name=f"length of {redact_url(url)}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise NetworkError(
            f"{redact_url(url)}: no answer within {seconds:g} s", hint="try --mirror"
        )
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]
