"""Mutated zip archives: an IntegrityError or files inside the folder, in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from download.zips import tree, zipped

from ssdctl.download.archive import MAX_RATIO, content_bytes, unpack
from ssdctl.download.fetch import no_progress
from ssdctl.errors import IntegrityError

CONTENT = {
    "train2017/1.jpg": random.Random(1).randbytes(700),
    "train2017/2.jpg": bytes(3000),
    "annotations/a.json": b'{"images": []}' * 50,
    "empty/": b"",
}
SIGNATURES = (b"PK\1\2", b"PK\3\4", b"PK\5\6")
EXTREMES = (0, 1, 2, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
NAMES = (b"../", b"/", b"\\", b"\0", b"..", b"C:", b".ssdctl/")
ZIP64 = struct.pack("<HHQQ", 1, 16, 2**63 - 1, 2**40)
MAX_PEAK_BYTES = 16 << 20  # Python's memory, for an archive with some 3 KB


def mutated(archive: bytes, rng: random.Random) -> bytes:
    """Damage headers and the central directory in one to four places."""
    content = bytearray(archive)
    for _ in range(rng.randint(1, 4)):
        starts = [i for s in SIGNATURES for i in find_all(bytes(content), s)]
        if not starts:
            break
        start = rng.choice(starts)
        place = min(start + rng.randint(0, 60), len(content) - 1)
        kind = rng.randrange(7)
        if kind == 0:
            content[place] = rng.randrange(256)
        elif kind == 1:  # a field of two or four bytes
            size = rng.choice((2, 4))
            content[place : place + size] = rng.choice(EXTREMES).to_bytes(4, "little")[:size]
        elif kind == 2:
            name = rng.choice(NAMES)
            content[place : place + len(name)] = name
        elif kind == 3:
            content[place:place] = rng.choice((ZIP64, rng.randbytes(8), b"PK\1\2"))
        elif kind == 4:
            del content[place : place + rng.randint(1, 40)]
        elif kind == 5:  # a record twice, or another record in its place
            other = rng.choice(starts)
            content[place:place] = content[other : other + rng.randint(4, 90)]
        else:
            del content[rng.randrange(len(content)) :]
    return bytes(content)


def find_all(content: bytes, pattern: bytes) -> list[int]:
    places, start = [], content.find(pattern)
    while start >= 0:
        places.append(start)
        start = content.find(pattern, start + 1)
    return places


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_archives(tmp_path: Path, count: int) -> None:
    complete = zipped(CONTENT)
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(count):
            archive = mutated(complete, random.Random(seed))
            folder = tmp_path / str(seed)
            folder.mkdir()
            path = folder / "a.zip"
            path.write_bytes(archive)
            tracemalloc.reset_peak()
            try:
                announced = content_bytes(path)
                entries = unpack(path, folder / "data", progress=no_progress)
            except IntegrityError:
                refused += 1
                assert list(tree(folder)) == ["a.zip"], seed
                assert not (folder / "data").exists() or not any((folder / "data").iterdir())
            else:
                unpacked = tree(folder / "data")
                found = {name: (len(data), zlib.crc32(data)) for name, data in unpacked.items()}
                assert {e.path: (e.size, e.crc) for e in entries} == found, seed
                size = sum(map(len, unpacked.values()))
                assert size == announced <= len(archive) * MAX_RATIO, seed
                assert {p.name for p in folder.iterdir()} == {"a.zip", "data"}, seed
            assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES, seed
            assert not any(p.is_symlink() for p in folder.rglob("*")), seed
    finally:
        tracemalloc.stop()
    assert refused > count / 2  # most mutations damage what is checked
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(str, range(count)))
