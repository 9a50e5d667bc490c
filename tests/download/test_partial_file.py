"""What is known of a file that was still arriving when its process, or its machine, went down."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from download.test_fetch import append

from ssdctl.download import partial_file as module
from ssdctl.download.partial_file import MIN_PIECE_BYTES, Part, part_paths
from ssdctl.errors import DiskError

CONTENT = random.Random(1).randbytes(3 * MIN_PIECE_BYTES)
URL = "http://host/a.bin"


def opened(target: Path, url: str = URL) -> Part:
    return Part(target, len(CONTENT), 4, url)


def leave(target: Path, *, synced: int, arrived: int) -> None:
    """What a download leaves: `arrived` bytes, the first `synced` ones with an fsync."""
    part = opened(target)
    part.adopt('"1"')
    append(part, CONTENT[:synced])
    part.sync(threading.Lock())
    part.pieces[0].is_taken = False
    append(part, CONTENT[synced:arrived])
    part.close()


def dies(*_: Any) -> int:
    raise OSError(errno.EIO, "died")


@pytest.mark.parametrize(
    ("boot", "expected"),
    [
        ("the same", 400_000),  # the kernel kept what the process had written
        ("another", 300_000),  # the machine went down: what was not synced may be lost
        ("", 300_000),  # a system that does not report it
    ],
)
def test_records_after_a_kill(
    boot: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.bin"
    monkeypatch.setattr(module, "boot_id", lambda: "the same")
    leave(target, synced=300_000, arrived=400_000)
    monkeypatch.setattr(module, "boot_id", lambda: boot)
    part = opened(target)
    assert (part.inherited, part.arrived_bytes, part.validator) == (expected, expected, '"1"')
    append(part, CONTENT[expected:])
    assert part.take() is None
    part.publish(target)
    part.close()
    assert target.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [target]


def test_a_record_follows_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies between the two has recorded nothing that is absent."""
    part = opened(tmp_path / "a.bin")
    before = part.state_path.read_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies)
        with pytest.raises(DiskError):
            append(part, CONTENT[:1000])
    assert part.state_path.read_bytes() == before
    part.close()


def test_a_kill_loses_what_arrived_since_the_last_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = opened(tmp_path / "a.bin")
    append(part, CONTENT[:1000])
    monkeypatch.setattr(module, "RECORD_S", 1e9)
    part.write(part.pieces[0], CONTENT[1000:2000])
    again = opened(tmp_path / "a.bin")
    assert again.inherited == 1000
    again.close()
    part.close()


def test_pieces_are_taken_by_one_connection_each(tmp_path: Path) -> None:
    part = opened(tmp_path / "a.bin")
    pieces = []
    while (piece := part.take()) is not None:
        pieces.append(piece)
    assert [len(piece.missing) for piece in pieces] == 3 * [MIN_PIECE_BYTES]
    part.write(pieces[1], CONTENT[:1000])
    part.write(pieces[2], CONTENT[:MIN_PIECE_BYTES])
    part.close()
    again = opened(tmp_path / "a.bin")
    spans = [(piece.start, piece.stop) for piece in again.pieces]
    middle = MIN_PIECE_BYTES + 1000
    assert spans == [(0, MIN_PIECE_BYTES), (middle, 2 * MIN_PIECE_BYTES)]
    again.close()


def test_a_part_has_its_length_after_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of full length without a state would be taken as complete."""

    monkeypatch.setattr(os, "ftruncate", dies)
    with pytest.raises(DiskError):
        opened(tmp_path / "a.bin")
    path, state = part_paths(tmp_path / "a.bin")
    assert path.stat().st_size == 0
    assert state.is_file()


def test_a_file_is_published_once_its_bytes_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.bin"
    part = opened(target)
    append(part, CONTENT)
    asked: list[str] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(what: Any, *more: Any, **how: Any) -> Any:
            path = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what
            asked.append(f"{name} {path.name}")
            return original(what, *more, **how)

        monkeypatch.setattr(owner, name, noted)

    note(os, "fsync")
    note(Path, "replace")
    note(Path, "unlink")
    part.publish(target)
    part.close()
    assert asked == [
        *("fsync a.bin.part", "replace a.bin.part"),
        *(f"fsync {tmp_path.name}", "unlink a.bin.part.state"),
    ]


def test_bytes_of_another_url_count_and_its_version_does_not(tmp_path: Path) -> None:
    leave(tmp_path / "a.bin", synced=1000, arrived=1000)
    part = opened(tmp_path / "a.bin", "http://mirror/a.bin")
    assert (part.inherited, part.validator) == (1000, "")
    part.close()


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("many", len(CONTENT)),  # nothing is known: the hash decides
        ([[5, 3]], 0),
        ([[0, 2**40]], 0),
        ([[7, 9], [8, 10]], 0),
        ([[-7, 9]], 0),
    ],
)
def test_an_invalid_state_is_ignored(missing: object, expected: int, tmp_path: Path) -> None:
    leave(tmp_path / "a.bin", synced=1000, arrived=1000)
    _, state = part_paths(tmp_path / "a.bin")
    state.write_text(json.dumps({**json.loads(state.read_bytes()), "missing": missing}))
    part = opened(tmp_path / "a.bin")
    assert part.arrived_bytes == expected
    part.close()


def test_a_complete_part_without_its_state_is_checked_by_the_hash(tmp_path: Path) -> None:
    path, state = part_paths(tmp_path / "a.bin")
    path.write_bytes(CONTENT)
    part = opened(tmp_path / "a.bin")
    assert (part.inherited, part.take()) == (len(CONTENT), None)
    assert state.is_file()
    part.close()


def test_a_part_that_cannot_be_made_is_a_disk_error(tmp_path: Path) -> None:
    part_paths(tmp_path / "a.bin")[1].mkdir()  # the place of the state
    with pytest.raises(DiskError, match=r"a\.bin\.part"):
        opened(tmp_path / "a.bin")
