"""A file that is received in pieces, over several connections; it survives kill -9.

`NAME.part` has the final length from the start (sparse). `NAME.part.state`, one line of JSON, lists
the ranges that are missing. It is written after their bytes, so it never claims bytes that were not
written, whenever the process dies. A machine that dies may keep the state and lose the bytes: after
a reboot the ranges count that were missing at the last fsync.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ssdctl.files import DECODE_ERRORS, disk_errors, no_follow, read_limited, sync_dir, write_bytes
from ssdctl.runtime.system import read_text

MIN_PIECE_BYTES = 256 * 1024
MAX_PIECE_BYTES = 16 * 1024 * 1024
MAX_STATE_BYTES = 1 << 20
RECORD_S = 0.02  # between two records of the state: what a kill loses


def boot_id() -> str:
    """Return an id that changes when this machine restarts; empty if the system has none."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


class Piece:
    """A range of missing bytes for one connection; `start` moves with the bytes that arrive."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.is_taken = False

    @property
    def missing(self) -> range:
        return range(self.start, self.stop)


class _State(msgspec.Struct):
    """The content of the state file; `missing` and `unsynced` are pairs of start and stop."""

    boot: str
    validator: str
    source: str
    missing: list[tuple[int, int]]
    unsynced: list[tuple[int, int]]


class Part:
    """The part file of `target` and its state. Not thread-safe: the caller holds a lock.

    Each of the `connections` fetches about four pieces. A part of another `source`, the URL, keeps
    its bytes (the hash decides at the end) but not its validator.
    """

    def __init__(self, target: Path, num_bytes: int, connections: int, source: str) -> None:
        self.path, self.state_path = part_paths(target)
        self.num_bytes = num_bytes
        self.source = hashlib.sha256(source.encode()).hexdigest()[:16]
        self.validator = ""  # the server's name of this version of the file
        size = -(-num_bytes // (4 * connections))
        self.piece_bytes = min(max(size, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        missing = self._read_state()
        self._data = self._state = -1
        try:
            with disk_errors(self.path, "writing"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._data = no_follow(self.path, os.O_RDWR | os.O_CREAT)
                # The state first: a part of full length without one would pass for whole.
                self._restart(missing)
                os.ftruncate(self._data, num_bytes)
        except BaseException:
            self.close()
            raise
        self.inherited = self.arrived_bytes

    def reset(self, validator: str) -> None:
        """Discard the received bytes: the server has another file now, called `validator`."""
        self.inherited = 0
        self._restart([(0, self.num_bytes)])
        self.adopt(validator)

    def adopt(self, validator: str) -> None:
        """Store the server's name of the file version, to detect a later change."""
        self.validator = validator
        self._record()

    def take(self) -> Piece | None:
        """Return the first missing bytes that no connection fetches, or None."""
        index = next((i for i, piece in enumerate(self.pieces) if not piece.is_taken), None)
        if index is None:
            return None
        piece = self.pieces[index]
        if len(piece.missing) > self.piece_bytes:
            self.pieces.insert(index + 1, Piece(piece.start + self.piece_bytes, piece.stop))
            piece.stop = piece.start + self.piece_bytes
        piece.is_taken = True
        return piece

    def widen(self, piece: Piece, validator: str) -> None:
        """Make the piece the whole file: the server sends all of it."""
        piece.start, piece.stop = 0, self.num_bytes
        self.pieces = [piece]
        self.adopt(validator)

    @property
    def arrived_bytes(self) -> int:
        return self.num_bytes - sum(len(piece.missing) for piece in self.pieces)

    def write(self, piece: Piece, data: bytes) -> None:
        """Store the next bytes of a piece."""
        view = memoryview(data)
        with disk_errors(self.path, "writing"):
            while view:
                count = os.pwrite(self._data, view, piece.start)
                piece.start += count
                view = view[count:]
            if not piece.missing:
                self.pieces.remove(piece)
            if time.monotonic() - self._recorded_s > RECORD_S:
                self._record()

    def sync(self, lock: threading.Lock) -> None:
        """Make the received bytes survive a power cut.

        Writes go on during the fsync: only bytes received before it are recorded as synced.
        """
        with lock:
            before = self._missing()
        os.fsync(self._data)
        with lock:
            self._unsynced = before
            self._record()
        os.fsync(self._state)

    def publish(self, target: Path) -> None:
        """Rename the complete, verified part to `target` and delete the state."""
        with disk_errors(target, "writing"):
            os.fsync(self._data)
            self.path.replace(target)
            sync_dir(target.parent)
            self.state_path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._state >= 0:
            with contextlib.suppress(OSError):  # the last record remains
                self._record()
        for descriptor in (self._data, self._state):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._state = -1

    def _restart(self, missing: Iterable[tuple[int, int]]) -> None:
        """Begin a state in which these ranges are missing."""
        self.pieces = [Piece(*span) for span in missing]
        self._unsynced = self._missing()
        if self.arrived_bytes:
            os.fsync(self._data)
        write_bytes(self.state_path, self._line())
        if self._state >= 0:
            os.close(self._state)
        self._state = no_follow(self.state_path, os.O_RDWR)
        self._recorded_s = 0.0

    def _missing(self) -> list[tuple[int, int]]:
        """Return the missing ranges, adjacent ones joined."""
        spans: list[tuple[int, int]] = []
        for piece in self.pieces:
            if spans and spans[-1][1] == piece.start:
                spans[-1] = (spans[-1][0], piece.stop)
            elif piece.missing:
                spans.append((piece.start, piece.stop))
        return spans

    def _line(self) -> bytes:
        state = _State(boot_id(), self.validator, self.source, self._missing(), self._unsynced)
        return msgspec.json.encode(state) + b"\n"

    def _record(self) -> None:
        os.pwrite(self._state, self._line(), 0)  # a longer earlier line may stay behind it
        self._recorded_s = time.monotonic()

    def _read_state(self) -> list[tuple[int, int]]:
        """Return the missing ranges of the part; a whole part without a state may be complete."""
        everything = [(0, self.num_bytes)]
        if not self.path.is_file() or self.path.stat().st_size != self.num_bytes:
            return everything
        try:
            line = read_limited(self.state_path, MAX_STATE_BYTES).partition(b"\n")[0]
            state = msgspec.json.decode(line, type=_State)
        except (OSError, *DECODE_ERRORS):
            return []  # the hash decides
        if state.source == self.source:
            self.validator = state.validator
        same_boot = bool(state.boot) and state.boot == boot_id()
        spans = state.missing if same_boot else state.unsynced
        edges = [0, *(edge for span in spans for edge in span), self.num_bytes]
        return spans if edges == sorted(edges) else everything


def part_paths(target: Path) -> tuple[Path, Path]:
    """Return the paths of the part of `target` and of its state."""
    return Path(f"{target}.part"), Path(f"{target}.part.state")


def remove_part(target: Path) -> None:
    """Delete the files of an unfinished download of `target`."""
    for path in part_paths(target):
        path.unlink(missing_ok=True)
