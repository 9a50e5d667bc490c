"""Transfer one file over HTTP: Range requests of several connections, written in place.

One worker starts. Once the server has answered with the requested range, the others start; a server
that ignores ranges keeps the one worker. A worker that fails while others are at work ends, because
the server may limit connections. Workers are daemon threads: the caller's thread watches
them, so that even a name look-up that never returns ends at the deadline.

`.NAME.ssdctl-part` survives kill -9. It has all bytes of the file from the start (sparse), and
after them one line of JSON that lists the missing ranges. The line is written after their bytes, so
it never claims bytes that were not written, whenever the process dies. A machine that dies may lose
bytes that it claims, and a server may have another version of the file by then: the hash differs,
and the file is fetched again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from pathlib import Path

import msgspec
import requests
import urllib3

from ssdctl.download.http import (
    MIRROR,
    RESUME,
    TICK_S,
    RetryPolicy,
    TemporaryFailure,
    describe_error,
    get,
    length_and_range,
    open_session,
    retry,
)
from ssdctl.download.pinned_files import PART_SUFFIX
from ssdctl.errors import DiskError, IntegrityError, NetworkError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    msgspec_type,
    no_follow,
    shortened,
    sync_dir,
)
from ssdctl.runtime.safe_text import redact_url
from ssdctl.runtime.system import run_in_daemon_thread

CHUNK_BYTES = 64 * 1024
MIN_PIECE_BYTES = 256 * 1024
MAX_PIECE_BYTES = 16 * 1024 * 1024
MAX_STATE_BYTES = 1 << 20
PAUSE_S = 1.0  # between two ticks: not a stall of the server
RECORD_S = 0.02  # save the state this often; a kill loses at most this much

# Label, bytes done, bytes in total. Called a few times a second, by one thread.
Progress = Callable[[str, int, int], None]


class Piece(msgspec.Struct, array_like=True, eq=False):
    """A range of missing bytes for one connection; `start` moves with the bytes that arrive."""

    start: int
    stop: int

    @property
    def missing(self) -> range:
        return range(self.start, self.stop)


class PartialFile:
    """The file `.NAME.ssdctl-part` of a download. Not thread-safe: the caller holds a lock.

    Each of the `connections` fetches about four pieces.
    """

    def __init__(self, target: Path, num_bytes: int, connections: int) -> None:
        self.path, self.num_bytes = partial_path(target), num_bytes
        size = -(-num_bytes // (4 * connections))
        self.piece_bytes = min(max(size, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        self._taken: set[Piece] = set()  # by a connection
        with disk_errors(self.path, "writing"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = no_follow(self.path, os.O_RDWR | os.O_CREAT)
        try:
            self.missing = self._read_missing()
            self._record()
        except BaseException:
            os.close(self._file)
            raise
        self.inherited = self.arrived_bytes

    def reset(self) -> None:
        """Discard the received bytes."""
        self.inherited = 0
        self.widen(Piece(0, 0))

    def take(self) -> Piece | None:
        """Return the first missing bytes that no connection fetches, or None."""
        pieces = self.missing
        for index, piece in enumerate(pieces):
            if piece not in self._taken:
                if len(piece.missing) > self.piece_bytes:
                    pieces.insert(index + 1, Piece(piece.start + self.piece_bytes, piece.stop))
                    piece.stop = piece.start + self.piece_bytes
                self._taken.add(piece)
                return piece
        return None

    def give_back(self, piece: Piece) -> bool:
        """Leave a piece to the other connections; return False if none of them is at work."""
        if not any(other in self._taken for other in self.missing if other is not piece):
            return False
        self._taken.discard(piece)
        return True

    def widen(self, piece: Piece) -> None:
        """Make the piece the whole file: the server sends all of it."""
        piece.start, piece.stop = 0, self.num_bytes
        self.missing = [piece]
        self._record()

    @property
    def arrived_bytes(self) -> int:
        return self.num_bytes - sum(len(piece.missing) for piece in self.missing)

    def write(self, piece: Piece, data: bytes) -> None:
        """Store the next bytes of a piece."""
        self._write(data, piece.start)
        piece.start += len(data)
        if not piece.missing:
            self.missing.remove(piece)
        if time.monotonic() - self._recorded_s > RECORD_S:
            self._record()

    def publish(self, target: Path) -> None:
        """Rename the complete, verified part to `target`."""
        with disk_errors(target, "writing"):
            os.ftruncate(self._file, self.num_bytes)
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
            self.path.replace(target)
            sync_dir(target.parent)

    def close(self) -> None:
        """Release the file; it is usable by the next download."""
        if self._file >= 0:
            with contextlib.suppress(DiskError):  # the last record remains
                self._record()
            os.close(self._file)

    def _record(self) -> None:
        line = msgspec.json.encode(self.missing) + b"\n"
        self._write(line, self.num_bytes)  # a longer earlier line may stay behind it
        self._recorded_s = time.monotonic()

    def _write(self, data: bytes, position: int) -> None:
        with disk_errors(self.path, "writing"):
            while data:
                count = os.pwrite(self._file, data, position)
                data, position = data[count:], position + count

    def _read_missing(self) -> list[Piece]:
        """Return the ranges that an earlier download left; a file without them may be complete."""
        everything = [Piece(0, self.num_bytes)]
        if os.fstat(self._file).st_size < self.num_bytes:
            return everything
        line = os.pread(self._file, MAX_STATE_BYTES, self.num_bytes).partition(b"\n")[0]
        try:
            missing = msgspec.json.decode(line, type=msgspec_type(list[Piece]))
        except DECODE_ERRORS:
            return []  # the hash decides
        edges = [0, *(edge for p in missing for edge in (p.start, p.stop)), self.num_bytes]
        return missing if edges == sorted(edges) else everything


def short_name(target: Path) -> str:
    """Return the name of a file, or one for it that leaves space for a suffix."""
    name = shortened(target.name)
    if name != target.name:  # others may begin like it
        name += f"-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]}"
    return name


def partial_path(target: Path) -> Path:
    return target.with_name(f".{short_name(target)}{PART_SUFFIX}")


class _Halted(Exception):  # noqa: N818 - not an error for the user
    """Raised in a worker after the transfer has ended."""


class _Restart(Exception):  # noqa: N818 - not an error for the user
    """Ranges do not work on this server: the file must be fetched from its start."""


def transfer(
    url: str,
    partial: PartialFile,
    label: str,
    connections: int,
    policy: RetryPolicy,
    progress: Progress,
) -> None:
    """Fetch the missing bytes of `partial`, over several connections if the server supports ranges.

    Received bytes are kept after a NetworkError.
    """
    ranges = True
    for _ in range(policy.restarts + 1):
        attempt = _Attempt(url, partial, policy, connections if ranges else 1, ranges)
        try:
            attempt.run(lambda done: progress(label, done, partial.num_bytes))
            return
        except _Restart:
            ranges = False
            partial.reset()
    raise NetworkError(
        f"{redact_url(url)}: started from zero {policy.restarts} times: the server ignores "
        "ranges, and its connections keep breaking",
        hint=f"try {MIRROR}, or fetch the file by other means",
    )


@dataclass
class _Attempt:
    """One set of workers for a file, until it is complete or must restart."""

    url: str
    partial: PartialFile
    policy: RetryPolicy
    connections: int
    ranges: bool  # whether to request ranges

    def __post_init__(self) -> None:
        self.session = open_session(self.connections)
        self.over = threading.Event()
        self.lock = threading.Lock()  # guards all below, and the file
        self.workers: list[Future[None]] = []
        self.received_bytes = 0
        self.stalls_at_s = time.monotonic() + self.policy.stall_s

    def run(self, progress: Callable[[int], None]) -> None:
        progress(self.partial.arrived_bytes)  # before the first byte: what an earlier run received
        limit_s, mark_bytes, now = self.policy.stall_s, 0, time.monotonic()
        with self.lock:  # the worker begins when it is in the list
            self.workers.append(run_in_daemon_thread(self._work))
        try:
            while True:
                done, running = wait(list(self.workers), TICK_S, FIRST_EXCEPTION)
                for worker in done:
                    worker.result()
                if not running and len(done) == len(self.workers):
                    break
                with self.lock:
                    arrived, received = self.partial.arrived_bytes, self.received_bytes - mark_bytes
                    before, now = now, time.monotonic()
                    if now - before > PAUSE_S:  # this process was stopped (Ctrl-Z)
                        self.stalls_at_s += now - before
                    if received >= self.policy.min_rate * limit_s:
                        mark_bytes, self.stalls_at_s = self.received_bytes, now + limit_s
                    elif now > self.stalls_at_s:
                        raise NetworkError(
                            f"{redact_url(self.url)}: {received} bytes in the last {limit_s:g} s: "
                            "stalled",
                            hint=f"{RESUME}, or try {MIRROR}",
                        )
                progress(arrived)
        finally:
            with self.lock:
                self.over.set()  # a worker that still waits for bytes changes nothing any more
            self.session.close()
        progress(self.partial.num_bytes)

    def _work(self) -> None:
        with contextlib.suppress(_Halted):
            while (piece := self._take()) is not None:
                while piece.missing:
                    before = self.received_bytes
                    try:
                        retry(functools.partial(self._request, piece), self.policy, self._pause)
                    except NetworkError:  # perhaps the server limits connections
                        with self.lock:
                            if self.partial.give_back(piece):
                                return
                            if self.received_bytes == before:
                                raise

    def _take(self) -> Piece | None:
        with self.lock:
            return None if self.over.is_set() else self.partial.take()

    def _pause(self, seconds: float, is_asked: bool) -> None:
        """Wait, at most until the transfer ends; a wait that the server requests is not a stall."""
        with self.lock:
            if is_asked:
                until_s = time.monotonic() + seconds + self.policy.stall_s
                self.stalls_at_s = max(self.stalls_at_s, until_s)
        if self.over.wait(seconds):
            raise _Halted

    def _request(self, piece: Piece) -> None:
        wanted, problem = piece.missing, "the server closed the connection without a byte"
        asked = wanted if self.ranges else None
        reply = get(self.session, self.url, asked, self.policy, self.partial.num_bytes)
        with reply:
            span = self._accepted(reply, piece, wanted)
            before = piece.start
            try:
                self._store(reply, piece, span)
            except urllib3.exceptions.HTTPError as error:  # in the body
                problem = describe_error(error)
        if piece.start == before:
            raise TemporaryFailure(
                f"{redact_url(self.url)}: {problem}", hint=f"{RESUME}, or try {MIRROR}"
            )

    def _accepted(self, reply: requests.Response, piece: Piece, wanted: range) -> range:
        """Return the range of bytes in a response, by its headers."""
        total, span = length_and_range(reply)
        if total is not None and total != self.partial.num_bytes:
            raise IntegrityError(
                f"{redact_url(self.url)}: the server's file has {total:,} bytes, the pinned one "
                f"{self.partial.num_bytes:,}",
                hint=f"the server has another file: try {MIRROR}",
            )
        with self.lock:
            if self.over.is_set():
                raise _Halted
            if reply.status_code == 416:
                raise _Restart
            if reply.status_code == 200:  # the whole file, regardless of the requested range
                if self.partial.arrived_bytes or len(self.workers) > 1:
                    raise _Restart
                self.partial.widen(piece)
                return piece.missing
            if not span or span.start != wanted.start or span.stop > wanted.stop:
                raise IntegrityError(
                    f"{redact_url(self.url)}: asked for bytes {wanted.start}-{wanted.stop - 1}, "
                    f"the server answers with Content-Range "
                    f"{reply.headers.get('Content-Range')!r}",
                    hint=f"the server is unreliable: try {MIRROR}",
                )
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
                    hint=f"the server has another file: try {MIRROR}",
                )
            with self.lock:
                if self.over.is_set():
                    raise _Halted
                self.partial.write(piece, data)
                self.received_bytes += len(data)
