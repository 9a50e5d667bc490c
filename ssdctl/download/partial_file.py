"""A file that is received in pieces, over several connections; it survives kill -9.

`NAME.part` has the final length from the start (sparse). `NAME.part.state` records how much of each
piece has arrived: a header of 1 KiB (JSON), then one record of 16 bytes a piece, (arrived, synced).
A record is written after its bytes, is inside one page and is never moved, so the state never
claims bytes that were not written, whenever the process dies. A machine that dies may keep the
record and lose the bytes: after a reboot only `synced` counts, which follows an fsync.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssdctl.errors import DiskError
from ssdctl.files import disk_errors, no_follow, read_limited, sync_dir, write_bytes

HEADER_BYTES = 1024
RECORD = struct.Struct("<QQ")
VERSION = 1
MIN_PIECE_BYTES = 256 * 1024
MAX_STATE_BYTES = 64 << 20
MAX_PIECE_BYTES = 16 * 1024 * 1024
LONGEST_VALIDATOR = 300  # as JSON; what is longer is not remembered


def piece_size(num_bytes: int, connections: int) -> int:
    """Return the bytes per piece: about four pieces per connection, to end at the same time."""
    size = -(-num_bytes // (4 * connections))
    return min(max(size, MIN_PIECE_BYTES), MAX_PIECE_BYTES)


def boot_id() -> str:
    """Return an id that changes when this machine restarts; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Part:
    """The part file of `target` and its state. Not thread-safe: the caller holds a lock.

    Args:
        target: The file's final path; the part is in the same folder.
        num_bytes: The file's whole length.
        connections: How many will fetch at once; decides the piece size of a new part.
        source: The URL. A part of another URL keeps its bytes (the hash decides at the end) but
            not its validator.

    Raises:
        DiskError: The part cannot be made.
    """

    def __init__(self, target: Path, num_bytes: int, connections: int, source: str) -> None:
        self.path, self.state_path = part_paths(target)
        self.num_bytes = num_bytes
        self.source = source
        self.validator = ""
        self.piece_bytes = piece_size(num_bytes, connections)
        arrived = self._read_state()
        if arrived is None and _size(self.path) == num_bytes:
            # A whole part whose state is lost: the hash decides.
            arrived = [len(self.span(i)) for i in range(self._count())]
        self.inherited = sum(arrived or [])
        with _all_disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._data = no_follow(self.path, os.O_RDWR | os.O_CREAT)
            self._state = -1
            try:
                # The state first: a part of full length without one would pass for whole.
                self._write_state(arrived or [0] * self._count())
                os.ftruncate(self._data, num_bytes)
            except BaseException:
                self.close()
                raise

    def reset(self, validator: str) -> None:
        """Discard the received bytes: the server has another file now, called `validator`."""
        self.inherited = 0
        self.validator = _short(validator)
        self._write_state([0] * self._count())

    def adopt(self, validator: str) -> None:
        """Store the server's name of the file version, to detect a later change."""
        self.validator = _short(validator)
        os.pwrite(self._state, self._header(), 0)

    def span(self, piece: int) -> range:
        """Return the bytes of a piece, received or not."""
        start = piece * self.piece_bytes
        return range(start, min(start + self.piece_bytes, self.num_bytes))

    def missing(self, piece: int) -> range:
        """Return the missing bytes of a piece."""
        return self.span(piece)[self.arrived[piece] :]

    def pending(self) -> list[int]:
        """Return the pieces with missing bytes."""
        return [i for i in range(self._count()) if self.missing(i)]

    @property
    def arrived_bytes(self) -> int:
        return sum(self.arrived)

    def write(self, offset: int, data: bytes) -> None:
        """Store bytes that follow what their piece has; they may run on into the next pieces."""
        view = memoryview(data)
        with _all_disk_errors(self.path):
            while view:
                piece = offset // self.piece_bytes
                assert offset == self.missing(piece).start, "pieces fill from their start"
                count = os.pwrite(self._data, view[: self.span(piece).stop - offset], offset)
                self.arrived[piece] += count
                self._record(piece)
                offset += count
                view = view[count:]

    def sync(self) -> None:
        """Make the received bytes survive a power cut.

        May run concurrently with `write`, without its lock: only bytes received before the fsync
        are recorded as synced, and a record that lags behind only makes bytes arrive again.
        """
        before = list(self.arrived)
        os.fsync(self._data)
        for piece, count in enumerate(before):
            if self._synced[piece] != count:
                self._synced[piece] = count
                self._record(piece)
        os.fsync(self._state)

    def publish(self, target: Path) -> None:
        """Rename the complete, verified part to `target` and delete the state."""
        with disk_errors(target, "writing"):
            os.fsync(self._data)
            self.path.replace(target)
            sync_dir(target.parent)
            self.state_path.unlink(missing_ok=True)

    def close(self) -> None:
        for descriptor in (self._data, self._state):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._state = -1

    def _count(self) -> int:
        return -(-self.num_bytes // self.piece_bytes)

    def _header(self) -> bytes:
        header = {
            "version": VERSION,
            "bytes": self.num_bytes,
            "piece_bytes": self.piece_bytes,
            "boot": boot_id(),
            "validator": self.validator,
            "source": _digest(self.source),
        }
        content = json.dumps(header).encode().ljust(HEADER_BYTES)
        assert len(content) == HEADER_BYTES
        return content

    def _write_state(self, arrived: list[int]) -> None:
        self.arrived = arrived
        self._synced = [0] * len(arrived)
        if any(arrived):
            os.fsync(self._data)
            self._synced = list(arrived)
        records = b"".join(RECORD.pack(*pair) for pair in zip(arrived, self._synced, strict=True))
        write_bytes(self.state_path, self._header() + records)
        if self._state >= 0:
            os.close(self._state)
        self._state = no_follow(self.state_path, os.O_RDWR)

    def _record(self, piece: int) -> None:
        record = RECORD.pack(self.arrived[piece], self._synced[piece])
        os.pwrite(self._state, record, HEADER_BYTES + piece * RECORD.size)

    def _read_state(self) -> list[int] | None:
        """Return how much of each piece is in the part; None if it is unknown."""
        if _size(self.path) != self.num_bytes:
            return None
        header: dict[str, Any]
        try:
            content = read_limited(self.state_path, MAX_STATE_BYTES)
            header = json.loads(content[:HEADER_BYTES])
            if header["version"] != VERSION or header["bytes"] != self.num_bytes:
                return None
            self.piece_bytes = max(int(header["piece_bytes"]), 1)
            pairs = list(RECORD.iter_unpack(content[HEADER_BYTES:]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error):
            return None
        if header["source"] == _digest(self.source):
            self.validator = str(header["validator"])
        same_boot = bool(boot_id()) and header["boot"] == boot_id()
        arrived = [pair[0] if same_boot else pair[1] for pair in pairs]
        is_complete = len(arrived) == self._count()
        if is_complete and all(n <= len(self.span(i)) for i, n in enumerate(arrived)):
            return arrived
        return [0] * self._count()


@contextlib.contextmanager
def _all_disk_errors(path: Path) -> Iterator[None]:
    """Convert all errors of the disk, also rare ones (a file system without such large files)."""
    try:
        with disk_errors(path, "writing"):
            yield
    except OSError as error:
        raise DiskError(f"{error.strerror} while writing {path}") from error


def part_paths(target: Path) -> tuple[Path, Path]:
    """Return the paths of the part of `target` and of its state."""
    part = target.with_name(target.name + ".part")
    return part, part.with_name(part.name + ".state")


def remove_part(target: Path) -> None:
    """Delete the files of an unfinished download of `target`."""
    for path in part_paths(target):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _short(validator: str) -> str:
    return validator if len(json.dumps(validator)) <= LONGEST_VALIDATOR else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
