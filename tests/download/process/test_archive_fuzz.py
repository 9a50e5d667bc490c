"""Mutated zip archives: an IntegrityError or files inside the folder, in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
from download.zips import tree, zipped
from fuzz.mutations import _mutate as mutate

from ssdctl.download.archive import MAX_RATIO, unpack
from ssdctl.download.fetch import no_progress
from ssdctl.errors import IntegrityError

CONTENT = {
    "train2017/1.jpg": random.Random(1).randbytes(70),
    "train2017/2.jpg": bytes(3000),
    "annotations/a.json": b'{"images": []}' * 50,
    "empty/": b"",
}
WORDS = (
    *(b"../", b"/", b"\\", b"\0", b"..", b"C:", b".ssdctl/", b"PK\1\2", b"PK\3\4", b"PK\5\6"),
    *(n.to_bytes(size, "little") for n in (0, 1, 0x7FFF, 0xFFFF) for size in (2, 4)),
    *(n.to_bytes(4, "little") for n in (0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)),
    struct.pack("<HHQQ", 1, 16, 2**63 - 1, 2**40),  # sizes of 64 bits
)
MAX_PEAK_BYTES = 16 << 20  # Python's memory, for an archive with some 3 KB


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_archives(tmp_path: Path, count: int) -> None:
    complete = zipped(CONTENT)
    refused = 0
    tracemalloc.start()
    try:
        for seed in range(count):
            archive = mutate(complete, WORDS, random.Random(seed))
            folder = tmp_path / str(seed)
            folder.mkdir()
            path = folder / "a.zip"
            path.write_bytes(archive)
            tracemalloc.reset_peak()
            try:
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
                assert size <= len(archive) * MAX_RATIO, seed
                assert {p.name for p in folder.iterdir()} == {"a.zip", "data"}, seed
            assert tracemalloc.get_traced_memory()[1] < MAX_PEAK_BYTES, seed
            assert not any(p.is_symlink() for p in folder.rglob("*")), seed
    finally:
        tracemalloc.stop()
    assert refused > count / 2  # most mutations damage what is checked
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(map(str, range(count)))
