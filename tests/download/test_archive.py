"""Faults 15 and 16: archives with false sizes, outside paths, bombs, or an early end."""

from __future__ import annotations

import random
import stat
import struct
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from download.zips import tree, zipped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssdctl.download import archive as archive_module
from ssdctl.download.archive import Entry, content_bytes, unpack
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


class TestUnpack:
    def test_content_lands_in_place(self, tmp_path: Path) -> None:
        entries = open_up(tmp_path, zipped(CONTENT), num_files=3)
        assert tree(tmp_path / "data") == CONTENT
        assert [tuple(e) for e in entries] == [
            (name, len(data), zlib.crc32(data)) for name, data in CONTENT.items()
        ]
        assert content_bytes(tmp_path / "a.zip") == sum(map(len, CONTENT.values()))

    def test_files_are_added_to_a_folder_that_exists(self, tmp_path: Path) -> None:
        there = tmp_path / "data" / "annotations"
        there.mkdir(parents=True)
        (there / "mine.json").write_bytes(b"mine")
        (there / "instances_train2017.json").write_bytes(b"old")
        open_up(tmp_path, zipped(CONTENT))
        assert tree(tmp_path / "data") == CONTENT | {"annotations/mine.json": b"mine"}

    def test_a_linked_folder_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train2017").symlink_to(tmp_path / "elsewhere")
        open_up(tmp_path, zipped(CONTENT))
        assert len(list((tmp_path / "elsewhere").iterdir())) == 2

    @pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second disk")
    def test_a_folder_linked_to_another_disk_gets_the_files(self, tmp_path: Path) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "train2017").symlink_to(elsewhere)
            content = CONTENT | {"train2017/more/a.jpg": b"1"}
            open_up(tmp_path, zipped(content))
            assert tree(Path(elsewhere)) == {
                name.removeprefix("train2017/"): data
                for name, data in content.items()
                if name.startswith("train2017/")
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

    @settings(
        max_examples=25,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def test_any_zip_round_trip(self, tmp_path: Path, data: st.DataObject) -> None:
        name = st.text("abé文 -", min_size=1, max_size=4).filter(lambda s: s not in (".", ".."))
        path = st.lists(name, min_size=1, max_size=3).map("/".join)
        content = data.draw(st.dictionaries(path, st.binary(max_size=300), min_size=1, max_size=5))
        names = [*content]
        if any(a != b and b.startswith(a + "/") for a in names for b in names):
            return  # a file and a folder of one name
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        open_up(folder, zipped(content))
        assert tree(folder / "data") == content


class TestUnsafe:
    """Fault 15."""

    @pytest.mark.parametrize(
        "name",
        [
            "../out",
            "a/../../out",
            "a/..",
            "/etc/passwd",
            "//out",
            "a\\..\\out",
            "C:\\out",
            "./a",
            "a//b",
            ".ssdctl/a.zip.json",
            "x" * 300,
            "/".join(["x" * 200] * 25),
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
        """As Python 3.12 reads the Unicode path of Info-ZIP, which replaces the name."""
        infolist = zipfile.ZipFile.infolist

        def renamed(self: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
            infos = infolist(self)
            infos[-1].filename = "../out"
            return infos

        monkeypatch.setattr(zipfile.ZipFile, "infolist", renamed)
        refused(tmp_path, zipped({"fine": b"1", "other": b"2"}), "not a plain path")
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR])
    def test_links_and_devices(self, tmp_path: Path, kind: int) -> None:
        def change(info: zipfile.ZipInfo) -> None:
            info.external_attr = (kind | 0o777) << 16

        refused(tmp_path, zipped({"link": b"/etc"}, change), "link or a device")

    def test_duplicates(self, tmp_path: Path) -> None:
        archive = zipped({"same1": b"1", "same2": b"2"}).replace(b"same2", b"same1")
        refused(tmp_path, archive, "twice")

    @pytest.mark.parametrize("order", [["a", "a/b"], ["a/b", "a"], ["a/", "a"], ["a/b/c", "a/b"]])
    def test_a_file_that_is_a_folder(self, tmp_path: Path, order: list[str]) -> None:
        refused(tmp_path, zipped(dict.fromkeys(order, b"")), "a file and a folder")

    @pytest.mark.parametrize("claimed", [0, 10, 2999, 3001, 100_000])
    def test_false_sizes(self, tmp_path: Path, claimed: int) -> None:
        data = CONTENT["train2017/000000000009.jpg"]
        archive = bytearray(zipped({"a": data}))
        directory = archive.rindex(b"PK\1\2")
        archive[directory + 24 : directory + 28] = struct.pack("<I", claimed)
        refused(tmp_path, bytes(archive))

    def test_a_folder_with_content(self, tmp_path: Path) -> None:
        archive = bytearray(zipped({"a/": b"", "b": b"1"}))
        directory = archive.index(b"PK\1\2")
        archive[directory + 24 : directory + 28] = struct.pack("<I", 9)
        refused(tmp_path, bytes(archive), "the folder 'a/' has content")

    def test_a_stored_file_of_two_sizes(self, tmp_path: Path) -> None:
        def store(info: zipfile.ZipInfo) -> None:
            info.compress_type = zipfile.ZIP_STORED

        archive = bytearray(zipped({"a": b"12345"}, store))
        directory = archive.index(b"PK\1\2")
        archive[directory + 24 : directory + 28] = struct.pack("<I", 4)
        refused(tmp_path, bytes(archive))

    def test_too_many_entries(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archive_module, "MAX_ENTRIES", 2)
        refused(tmp_path, zipped(CONTENT), "3 entries are too many")

    def test_a_bomb(self, tmp_path: Path) -> None:
        refused(tmp_path, zipped({"zeros": bytes(3_000_000)}), "bomb")

    def test_overlapping_entries(self, tmp_path: Path) -> None:
        archive = bytearray(zipped({f"a{i}": random.Random(i).randbytes(2000) for i in range(3)}))
        for start in _all(archive, b"PK\1\2"):
            archive[start + 20 : start + 24] = struct.pack("<I", 4000)
        refused(tmp_path, bytes(archive), "overlap")

    def test_encrypted_or_packed_otherwise(self, tmp_path: Path) -> None:
        archive = bytearray(zipped({"a": b"1"}))
        start = archive.index(b"PK\1\2")
        encrypted, lzma = archive[:], archive[:]
        encrypted[start + 8] |= 1
        refused(tmp_path, bytes(encrypted), "encrypted")
        lzma[start + 10] = zipfile.ZIP_LZMA
        refused(tmp_path, bytes(lzma), "method 14")

    def test_a_wrong_crc(self, tmp_path: Path) -> None:
        archive = bytearray(zipped(CONTENT))
        archive[archive.index(b"PK\1\2") + 16] ^= 1
        refused(tmp_path, bytes(archive), "CRC")

    def test_nothing_in_it(self, tmp_path: Path) -> None:
        refused(tmp_path, zipped({}), "no files")


class TestBroken:
    """Fault 16; other damage is in test_archive_fuzz.py."""

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        archive = zipped(CONTENT)
        dice = random.Random(0)
        cuts = {0, 1, len(archive) - 1, len(archive) - 21, len(archive) - 22}
        for cut in sorted(cuts | {dice.randrange(len(archive)) for _ in range(40)}):
            refused(tmp_path, archive[:cut])


def _all(content: bytearray, mark: bytes) -> list[int]:
    positions = [content.find(mark)]
    while (place := content.find(mark, positions[-1] + 1)) >= 0:
        positions.append(place)
    return positions
