"""What is known of a file that was still arriving when its process went down."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from download.test_fetch import append
from test_files import noted

from ssdctl.download import transfer
from ssdctl.download.transfer import MIN_PIECE_BYTES, PartialFile, partial_path
from ssdctl.errors import DiskError, UsageError

CONTENT = random.Random(1).randbytes(3 * MIN_PIECE_BYTES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a.bin"


def opened(target: Path) -> PartialFile:
    return PartialFile(target, len(CONTENT), 4)


def leave(target: Path, arrived: int) -> None:
    """Leave what a killed download does: the first bytes."""
    partial = opened(target)
    append(partial, CONTENT[:arrived])
    partial.close()


def test_a_part_is_continued_and_published(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published once its bytes are on the disk."""
    leave(target, 400_000)
    partial = opened(target)
    assert (partial.inherited, partial.arrived_bytes) == (400_000, 400_000)
    append(partial, CONTENT[400_000:])
    assert partial.take() is None
    calls = noted(monkeypatch)
    partial.publish(target)
    partial.close()
    assert calls == [f"fsync {len(CONTENT)}", "rename", "fsync folder"]  # without the record
    assert target.read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_a_record_follows_its_bytes(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies between the two has recorded nothing that is absent."""
    partial = opened(target)
    before = partial.path.read_bytes()

    def dies(*_: Any) -> int:
        raise OSError(errno.EIO, "died")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", dies)
        with pytest.raises(DiskError, match=r"a\.bin\.ssdctl-part"):
            append(partial, CONTENT[:1000])
    assert partial.path.read_bytes() == before
    monkeypatch.setattr(transfer, "RECORD_S", 1e9)
    partial.write(partial.missing[0], CONTENT[:2000])  # no record follows: a kill loses these bytes
    again = opened(target)
    assert again.inherited == 0
    again.close()
    partial.close()


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        *((wrong, 0) for wrong in ([[5, 3]], [[0, 2**40]], [[7, 9], [8, 10]], [[-7, 9]])),
        # No record, or none that can be read: the hash decides whether the file is complete.
        *((unknown, len(CONTENT)) for unknown in ("many", None)),
    ],
)
def test_an_invalid_record_is_ignored(missing: object, expected: int, target: Path) -> None:
    leave(target, 1000)
    path = partial_path(target)
    content, line = path.read_bytes()[: len(CONTENT)], path.read_bytes()[len(CONTENT) :]
    assert json.loads(line.partition(b"\n")[0]) == [[1000, len(CONTENT)]]
    changed = b"" if missing is None else json.dumps(missing).encode()
    path.write_bytes(content + changed)
    partial = opened(target)
    assert partial.arrived_bytes == expected
    partial.close()


def test_a_link_or_folder_as_a_part_is_refused(target: Path) -> None:
    victim = target.with_name("victim")
    victim.write_text("precious")
    partial_path(target).symlink_to(victim)
    with pytest.raises(UsageError, match=r"a\.bin\.ssdctl-part"):
        opened(target)
    assert victim.read_text() == "precious"
    partial_path(target).unlink()
    partial_path(target).mkdir()
    with pytest.raises(DiskError, match=r"a\.bin\.ssdctl-part"):
        opened(target)
