"""Transfer one file over HTTP: Range requests of several connections, written in place.

One worker starts. Once the server has answered with the requested range, the others start; a server
that ignores ranges keeps the one worker. Workers are daemon threads: the caller's thread watches
them, so that even a name look-up that never returns ends at the deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field

import requests
import urllib3

from ssdctl.download.http import (
    RetryPolicy,
    content_length,
    content_range,
    describe_error,
    get,
    open_session,
    validator_of,
)
from ssdctl.download.partial_file import Part, Piece
from ssdctl.errors import IntegrityError, NetworkError
from ssdctl.runtime.safe_text import redact_url
from ssdctl.runtime.threads import run_in_daemon_thread

CHUNK_BYTES = 64 * 1024
TICK_S = 0.1
SYNC_S = 10.0
RESUME = "received bytes are kept: run it again to continue, or try --mirror"

# Label, bytes done, bytes in total. Called a few times a second, by one thread.
Progress = Callable[[str, int, int], None]


class _Halted(Exception):  # noqa: N818 - not an error for the user
    """Raised in a worker after the transfer has ended."""


class _Restart(Exception):  # noqa: N818 - not an error for the user
    """The received bytes belong to another file, or ranges do not work on this server."""

    def __init__(self, validator: str, *, ranges: bool = True) -> None:
        super().__init__(validator)
        self.validator, self.ranges = validator, ranges


def transfer(
    url: str, part: Part, label: str, connections: int, policy: RetryPolicy, progress: Progress
) -> None:
    """Fetch the missing bytes of `part`, over several connections if the server supports ranges.

    Received bytes are kept after a NetworkError.
    """
    ranges = True
    for left in range(policy.restarts, -1, -1):
        # Servers behind one name may give the same file different validators. So the last attempt
        # ignores them: the hash decides.
        try:
            _Attempt(url, part, policy, connections if ranges else 1, ranges, left > 0).run(
                lambda done: progress(label, done, part.num_bytes)
            )
            return
        except _Restart as change:
            ranges = ranges and change.ranges
            part.reset(change.validator)
    raise NetworkError(
        f"{redact_url(url)}: started from zero {policy.restarts} times: the file keeps changing, "
        "or the server ignores ranges and its connections keep breaking",
        hint="try --mirror, or fetch the file by other means",
    )


@dataclass
class _Attempt:
    """One set of workers for a file, until it is complete or must restart."""

    url: str
    part: Part
    policy: RetryPolicy
    connections: int
    ranges: bool  # whether to request ranges
    watch_version: bool  # whether another validator means another file

    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards all below, and the part
    workers: list[Future[None]] = field(default_factory=list)
    open_replies: set[requests.Response] = field(default_factory=set)
    received_bytes: int = 0
    waited_until_s: float = 0.0  # the end of the last wait that the server asked for
    waiting: int = 0

    def __post_init__(self) -> None:
        self.session = open_session(self.connections, self.policy, self._pause)

    def run(self, progress: Callable[[int], None]) -> None:
        progress(self.part.arrived_bytes)  # before the first byte: what an earlier run received
        mark_bytes, mark_s = 0, time.monotonic()
        synced_s = mark_s
        self.workers.append(run_in_daemon_thread(self._work))
        try:
            while True:
                done, running = wait(list(self.workers), TICK_S, FIRST_EXCEPTION)
                for worker in done:
                    worker.result()
                if not running and len(done) == len(self.workers):
                    break
                with self.lock:
                    received, waiting = self.received_bytes, self.waiting
                    arrived = self.part.arrived_bytes
                progress(arrived)
                now = time.monotonic()
                if now - synced_s > SYNC_S:
                    self.part.sync(self.lock)
                    synced_s = now = time.monotonic()
                if waiting or received - mark_bytes >= self.policy.min_rate * self.policy.stall_s:
                    mark_bytes, mark_s = received, now
                elif now - max(mark_s, self.waited_until_s) > self.policy.stall_s:
                    raise NetworkError(
                        f"{redact_url(self.url)}: {received - mark_bytes} bytes in the last "
                        f"{self.policy.stall_s:g} s: stalled",
                        hint=RESUME,
                    )
        finally:
            with self.lock:
                self.over.set()
                for reply in self.open_replies:
                    # Stops a worker that waits for bytes. One that waits for a response's headers,
                    # or for a name look-up, ends by its timeout and changes nothing any more.
                    with contextlib.suppress(Exception):
                        reply.raw.shutdown()
            wait(self.workers, 1)
            self.session.close()
        progress(self.part.num_bytes)

    def _work(self) -> None:
        with contextlib.suppress(_Halted):
            while True:
                with self.lock:
                    piece = None if self.over.is_set() else self.part.take()
                if piece is None:
                    return
                self._fetch(piece)

    def _fetch(self, piece: Piece) -> None:
        """Request a piece until it is complete."""
        failures = 0
        while piece.missing:
            before = piece.start
            problem = "the server closed the connection without a byte"
            try:
                self._request(piece)
            except urllib3.exceptions.HTTPError as error:  # in the body
                problem = describe_error(error)
            if piece.start > before:
                failures = 0
                continue
            failures += 1
            if failures > self.policy.retries:
                raise NetworkError(
                    f"{redact_url(self.url)}: {problem} (tried {failures} times)", hint=RESUME
                )
            wait_s = self.policy.backoff_s * 2 ** (failures - 1)
            self._pause(min(wait_s, self.policy.longest_wait_s))

    def _pause(self, seconds: float, is_asked: bool = False) -> None:
        """Wait, or until the transfer ends; a wait that the server asked for is not a stall."""
        with self.lock:
            self.waiting += is_asked
        is_over = self.over.wait(seconds)
        with self.lock:
            self.waiting -= is_asked
            if is_asked:
                self.waited_until_s = time.monotonic()
        if is_over:
            raise _Halted

    def _request(self, piece: Piece) -> None:
        """Send one request for what the piece lacks, and write what is received."""
        wanted = piece.missing
        known = self.part.validator if self.watch_version else ""
        reply = get(self.session, self.url, wanted if self.ranges else None, known, self.policy)
        with reply:
            with self.lock:
                self.open_replies.add(reply)
            try:
                self._store(reply, piece, self._accepted(reply, piece, wanted))
            finally:
                with self.lock:
                    self.open_replies.discard(reply)

    def _accepted(self, reply: requests.Response, piece: Piece, wanted: range) -> range:
        """Return the bytes that this response contains, by its headers."""
        version, (span, total) = validator_of(reply), content_range(reply)
        if reply.status_code == 200:
            total = content_length(reply)
        if total is not None and total != self.part.num_bytes:
            raise IntegrityError(
                f"{redact_url(self.url)}: the server's file has {total:,} bytes, the pinned one "
                f"{self.part.num_bytes:,}",
                hint="the server has another file: try --mirror, or correct the manifest",
            )
        with self.lock:
            if self.over.is_set():
                raise _Halted
            if reply.status_code == 416:
                raise _Restart(version, ranges=False)
            if reply.status_code == 200:  # the whole file, regardless of the requested range
                if self.part.arrived_bytes or len(self.workers) > 1:
                    raise _Restart(version, ranges=self.ranges)
                self.part.widen(piece, version)
                return piece.missing
            if span is None or span.start != wanted.start or not span or span.stop > wanted.stop:
                raise IntegrityError(
                    f"{redact_url(self.url)}: asked for bytes {wanted.start}-{wanted.stop - 1}, "
                    f"the server answers with Content-Range "
                    f"{reply.headers.get('Content-Range')!r}",
                    hint="the server is unreliable: try --mirror",
                )
            known = self.part.validator
            if known and version and version != known and self.watch_version:
                raise _Restart(version)
            if version and not known:
                self.part.adopt(version)
            while len(self.workers) < self.connections:
                self.workers.append(run_in_daemon_thread(self._work))
            return span

    def _store(self, reply: requests.Response, piece: Piece, span: range) -> None:
        left = len(span)
        while data := reply.raw.read1(CHUNK_BYTES, decode_content=False):
            left -= len(data)
            if left < 0:
                raise IntegrityError(
                    f"{redact_url(self.url)}: the server sends more than the {len(span)} bytes it "
                    "was expected to",
                    hint="the server has another file: try --mirror",
                )
            with self.lock:
                if self.over.is_set():
                    raise _Halted
                self.part.write(piece, data)
                self.received_bytes += len(data)


def length_of(url: str, policy: RetryPolicy) -> int:
    """Request the size of the file in bytes; NetworkError if the server does not state it."""
    deadline = time.monotonic() + policy.stall_s

    def pause(seconds: float, is_asked: bool) -> None:
        nonlocal deadline
        deadline += seconds * is_asked
        time.sleep(seconds)

    def request() -> int | None:
        with (
            open_session(1, policy, pause) as session,
            get(session, url, range(1), "", policy) as reply,
        ):
            return content_length(reply) if reply.status_code == 200 else content_range(reply)[1]

    result = run_in_daemon_thread(request)
    while not wait([result], TICK_S).done:
        if time.monotonic() > deadline:
            raise NetworkError(
                f"{redact_url(url)}: no answer within {policy.stall_s:g} s", hint="try --mirror"
            )
    if not (total := result.result()):
        raise NetworkError(f"{redact_url(url)}: the server does not state the length of the file")
    return total
