"""Faults 15 and 16: archives with false sizes, outside paths, bombs, or an early end."""

from __future__ import annotations

import random
import re
import stat
import struct
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from download.zips import tree, zipped

from ssdctl.download import dataset as dataset_module
from ssdctl.download.dataset import Entry, unpack
from ssdctl.download.fetch import no_progress
from ssdctl.errors import IntegrityError

CONTENT = {
    "train2017/000000000009.jpg": random.Random(1).randbytes(3000),
    "train2017/000000000025.jpg": random.Random(2).randbytes(5000),
    "annotations/instances_train2017.json": b'{"images": []}' * 20,
}


def open_up(folder: Path, archive: bytes, num_files: int | None = None) -> list[Entry]:
    """Unpack `archive`, which is in `folder`, into `folder/data`."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.zip"
    path.write_bytes(archive)
    return unpack(path, folder / "data", num_files=num_files, progress=no_progress)


def refused(folder: Path, archive: bytes, match: str | None = None) -> None:
    """Unpacking fails with 5 and leaves only the archive in its folder."""
    with pytest.raises(IntegrityError, match=match):
        open_up(folder, archive)
    assert list(tree(folder)) == ["a.zip"]
    assert not (folder / "data").exists() or not list((folder / "data").iterdir())


def with_field(archive: bytes, position: int, value: int, size: int = 4) -> bytes:
    """Change a field of every entry in the archive's directory."""
    content = bytearray(archive)
    for match in re.finditer(b"PK\1\2", archive):
        start = match.start() + position
        content[start : start + size] = value.to_bytes(size, "little")
    return bytes(content)


class TestUnpack:
    def test_content_lands_in_place(self, tmp_path: Path) -> None:
        entries = open_up(tmp_path, zipped(CONTENT), num_files=3)
        assert tree(tmp_path / "data") == CONTENT
        assert [tuple(e) for e in entries] == [
            (name, len(data), zlib.crc32(data)) for name, data in CONTENT.items()
        ]

    def test_files_are_added_to_a_folder_that_exists(self, tmp_path: Path) -> None:
        there = tmp_path / "data" / "annotations"
        there.mkdir(parents=True)
        (there / "mine.json").write_bytes(b"mine")
        (there / "instances_train2017.json").write_bytes(b"old")
        open_up(tmp_path, zipped(CONTENT))
        assert tree(tmp_path / "data") == CONTENT | {"annotations/mine.json": b"mine"}

    @pytest.mark.parametrize("disk", [None, "/dev/shm"])
    def test_a_linked_folder_gets_the_files(self, tmp_path: Path, disk: str | None) -> None:
        if disk is not None and not Path(disk).is_dir():
            pytest.skip("needs a second disk")
        with tempfile.TemporaryDirectory(dir=disk) as elsewhere:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "train2017").symlink_to(elsewhere)
            (Path(elsewhere) / "000000000009.jpg").write_bytes(b"old")
            content = CONTENT | {"train2017/more/a.jpg": b"1"}
            open_up(tmp_path, zipped(content))
            assert (tmp_path / "data" / "train2017").is_symlink()
            assert {f"train2017/{k}": v for k, v in tree(Path(elsewhere)).items()} == {
                name: data for name, data in content.items() if name.startswith("train2017/")
            }
        assert not (tmp_path / "data" / ".a.zip.unpacking").exists()

    def test_remains_of_a_killed_run_are_removed(self, tmp_path: Path) -> None:
        left = tmp_path / "data" / ".a.zip.unpacking" / "train2017"
        left.mkdir(parents=True)
        (left / "half.jpg").write_bytes(b"")
        open_up(tmp_path, zipped(CONTENT))
        assert tree(tmp_path / "data") == CONTENT

    def test_folders_and_empty_files(self, tmp_path: Path) -> None:
        open_up(tmp_path, zipped({"a/": b"", "a/b/": b"", "a/c": b"", "top": b"x"}))
        assert tree(tmp_path / "data") == {"a/c": b"", "top": b"x"}
        assert (tmp_path / "data" / "a" / "b").is_dir()

    def test_another_number_of_files(self, tmp_path: Path) -> None:
        with pytest.raises(IntegrityError, match=r"\b3\b.*\b4\b"):
            open_up(tmp_path, zipped(CONTENT), num_files=4)
        assert list(tree(tmp_path)) == ["a.zip"]


class TestUnsafe:
    """Fault 15."""

    @pytest.mark.parametrize(
        "name",
        [
            *("../out", "a/../../out", "a/..", "/etc/passwd", "//out", "a\\..\\out", "C:\\out"),
            *("./a", "a//b", ".ssdctl/a.zip.json", "x" * 300, "/".join(["x" * 200] * 25)),
        ],
    )
    def test_names(self, tmp_path: Path, name: str) -> None:
        refused(tmp_path, zipped({"fine": b"1", name: b"2"}))

    def test_nul(self, tmp_path: Path) -> None:
        archive = zipped({"fine": b"1", "aXb": b"2"}).replace(b"aXb", b"a\0b")
        refused(tmp_path, archive, "not a plain path")

    def test_another_name_in_an_extra_field(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The Unicode path of Info-ZIP: Python 3.12 and later takes it as the name."""

        def change(info: zipfile.ZipInfo) -> None:
            name = b"../" + info.filename.encode()
            crc = zlib.crc32(info.filename.encode())
            info.extra = struct.pack("<HHBL", 0x7075, 5 + len(name), 1, crc) + name

        if sys.version_info < (3, 12):
            infolist = zipfile.ZipFile.infolist

            def renamed(self: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
                infos = infolist(self)
                infos[-1].filename = "../out"
                return infos

            monkeypatch.setattr(zipfile.ZipFile, "infolist", renamed)
        refused(tmp_path, zipped({"out": b"2"}, change), "not a plain path")

    @pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
    def test_links_and_devices(self, tmp_path: Path, kind: int) -> None:
        def change(info: zipfile.ZipInfo) -> None:
            info.external_attr = (kind | 0o777) << 16

        refused(tmp_path, zipped({"link": b"/etc"}, change), "link or a device")

    def test_duplicates(self, tmp_path: Path) -> None:
        archive = zipped({"same1": b"1", "same2": b"2"}).replace(b"same2", b"same1")
        refused(tmp_path, archive, "same1")

    @pytest.mark.parametrize("order", [["a", "a/b"], ["a/b", "a"], ["a/", "a"], ["a/b/c", "a/b"]])
    def test_a_file_that_is_a_folder(self, tmp_path: Path, order: list[str]) -> None:
        refused(tmp_path, zipped(dict.fromkeys(order, b"")), "'a")

    @pytest.mark.parametrize("claimed", [0, 10, 2999, 3001, 100_000])
    def test_false_sizes(self, tmp_path: Path, claimed: int) -> None:
        data = CONTENT["train2017/000000000009.jpg"]
        refused(tmp_path, with_field(zipped({"a": data}), 24, claimed))

    @pytest.mark.parametrize(
        ("content", "position", "value", "match"),
        [
            ({"a/": b""}, 24, 9, "the folder 'a/' has content"),
            ({f"a{i}": random.Random(i).randbytes(2000) for i in range(3)}, 20, 4000, "overlap"),
            ({"a": b"1"}, 8, 1, "encrypted"),
            ({"a": b"1"}, 10, zipfile.ZIP_LZMA, "method 14"),
            ({"a": b"1"}, 16, 12345, "CRC"),
        ],
    )
    def test_fields(
        self, tmp_path: Path, content: dict[str, bytes], position: int, value: int, match: str
    ) -> None:
        size = 2 if position < 16 else 4
        refused(tmp_path, with_field(zipped(content), position, value, size), match)

    def test_a_stored_file_of_two_sizes(self, tmp_path: Path) -> None:
        def store(info: zipfile.ZipInfo) -> None:
            info.compress_type = zipfile.ZIP_STORED

        refused(tmp_path, with_field(zipped({"a": b"12345"}, store), 24, 4))

    def test_too_many_entries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dataset_module, "MAX_ENTRIES", 2)
        refused(tmp_path, zipped(CONTENT), "3 entries are too many")

    def test_a_bomb(self, tmp_path: Path) -> None:
        refused(tmp_path, zipped({"zeros": bytes(3_000_000)}), "bomb")

    def test_nothing_in_it(self, tmp_path: Path) -> None:
        refused(tmp_path, zipped({}), "0 files")


class TestBroken:
    """Fault 16; other damage is in tests/fuzz."""

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        archive = zipped(CONTENT)
        dice = random.Random(0)
        cuts = {0, 1, len(archive) - 1, len(archive) - 21, len(archive) - 22}
        for cut in sorted(cuts | {dice.randrange(len(archive)) for _ in range(40)}):
            refused(tmp_path, archive[:cut])
