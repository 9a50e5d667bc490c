"""A dataset's download: several files and unpacked archives, also hostile and damaged ones."""

import os
import random
import re
import stat
import tempfile
import zipfile
import zlib
from pathlib import Path

import pytest
from download.http_server import Server
from download.zips import content, pinned, tree, zipped

from ssdctl.download import dataset as dataset_module
from ssdctl.download.dataset import Entry, download, list_files, needed_bytes, unpack, verify
from ssdctl.download.fetch import SPARE_BYTES, fetch, no_progress
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import DiskError, IntegrityError, NetworkError

IMAGES = {f"train2017/{i:012d}.jpg": random.Random(i).randbytes(2000) for i in range(100)}
NOTES = {"annotations/instances_train2017.json": b"[1, 2, 3]" * 10}
WANTED = IMAGES | NOTES | {"README": b"a readme"}


@pytest.fixture
def files(server: Server) -> list[PinnedFile]:
    return [
        pinned(server, "images.zip", zipped(IMAGES), unpack=True),
        pinned(server, "notes.zip", zipped(NOTES), unpack=True),
        pinned(server, "README", WANTED["README"]),
    ]


def states(results: list[dict[str, object]]) -> list[object]:
    return [row["state"] for row in results]


def test_archives_are_unpacked_and_only_what_is_missing_is_fetched(
    server: Server, files: list[PinnedFile], tmp_path: Path
) -> None:
    notes = server.routes.pop("/notes.zip")
    with pytest.raises(NetworkError):
        download(files, tmp_path)
    assert content(tmp_path) == IMAGES, "what is done is kept"
    server.routes["/notes.zip"] = notes
    done = download(files, tmp_path)
    assert content(tmp_path) == WANTED
    assert states(done) == ["present", "fetched", "fetched"]
    assert done[0]["files"] == 100
    before = len(server.requests)
    assert states(download(files, tmp_path)) == ["present"] * 3
    assert len(server.requests) == before
    assert states(list_files(files, tmp_path, None)) == ["present"] * 3
    (tmp_path / next(iter(IMAGES))).unlink()
    kept = download(files, tmp_path, keep_archives=True)
    assert states(kept) == ["fetched", "present", "present"]
    assert set(content(tmp_path)) == set(WANTED) | {"images.zip"}


def test_another_version_of_an_archive_removes_nothing(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = {"gone.txt": b"x"}
    download([pinned(server, "notes.zip", zipped(NOTES | gone), unpack=True)], tmp_path)
    newer = pinned(server, "notes.zip", zipped(dict.fromkeys(NOTES, b"more")), unpack=True)
    assert states(list_files([newer], tmp_path, None)) == ["missing"]
    assert states(download([newer], tmp_path)) == ["fetched"]
    kept = {f"{name}.replaced": data for name, data in NOTES.items()}
    assert content(tmp_path) == dict.fromkeys(NOTES, b"more") | kept | gone
    assert "lacks 1 file of the earlier one" in caplog.text


def test_a_file_of_the_user_with_an_archives_name_is_kept(
    files: list[PinnedFile], tmp_path: Path
) -> None:
    for name in ("images.zip.replaced", "images.zip"):  # not unpacked yet, and unpacked
        (tmp_path / "images.zip").write_bytes(b"mine")
        download(files[:1], tmp_path)
        assert content(tmp_path)[name] == b"mine"


def test_an_archive_counts_as_unpacked_once_its_content_is_on_the_disk(
    files: list[PinnedFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, a record of absent files would prevent their download."""
    seen: list[set[str]] = []
    monkeypatch.setattr(os, "sync", lambda: seen.append(set(tree(tmp_path))))
    download(files[:1], tmp_path)
    ((before),) = seen
    record = ".ssdctl/images.zip.json"
    assert set(IMAGES) <= before
    assert {name for name in before if name.startswith(record)} == {f"{record}.lock"}
    assert (tmp_path / record).is_file()


def test_content_that_does_not_fit_is_seen_before_it_is_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest need not list the size of an archive's content; the archive itself does."""
    packs_well = random.Random(0).randbytes(3000) * 20
    archive = pinned(server, "zeros.zip", zipped({"a": packs_well}), unpack=True)
    free = SPARE_BYTES + 3 * (archive.bytes or 0)
    monkeypatch.setattr("ssdctl.download.fetch.free_bytes", lambda _: free)
    with pytest.raises(DiskError, match=r"zeros\.zip"):
        download([archive], tmp_path)
    assert list(content(tmp_path)) == ["zeros.zip"]
    left = tmp_path / ".ssdctl/zeros.zip.unpacking"  # of a killed run
    left.mkdir()
    monkeypatch.setattr("ssdctl.download.fetch.free_bytes", lambda _: 0 if left.exists() else 1e9)
    assert states(download([archive], tmp_path)) == ["fetched"]


@pytest.mark.parametrize("name", ["{}/images.zip", "n" * 249 + "{}.zip"])
def test_archives_of_similar_names(server: Server, tmp_path: Path, name: str) -> None:
    for letter in "ab":
        archive = pinned(server, name.format(letter), zipped({f"{letter}.jpg": b"x"}), unpack=True)
        download([archive], tmp_path)
    assert content(tmp_path) == {"a.jpg": b"x", "b.jpg": b"x"}
    assert len([*tmp_path.rglob("*.json")]) == 2


def test_no_archive_replaces_another_file_of_the_download(server: Server, tmp_path: Path) -> None:
    first = pinned(server, "a.zip", zipped({"README": b"a", "LICENSE": b"same"}), unpack=True)
    other = pinned(server, "b.zip", zipped({"README": b"b", "LICENSE": b"same"}), unpack=True)
    with pytest.raises(IntegrityError, match=r"b\.zip.*'README'.*a\.zip"):
        download([first, other], tmp_path)
    assert (tmp_path / "README").read_bytes() == b"a"
    agrees = pinned(server, "b.zip", zipped({"LICENSE": b"same"}), unpack=True)
    assert states(download([first, agrees], tmp_path)) == ["present", "fetched"]
    plain = pinned(server, "notes", b"more")
    for name in ("a.zip", "c.zip", "notes"):  # an archive's own name, and another file's
        hides = pinned(server, "c.zip", zipped({name: b"x"}), unpack=True)
        with pytest.raises(IntegrityError, match=rf"c\.zip.*{name}"):
            download([hides, first, plain], tmp_path)
    before = len(server.requests)
    with pytest.raises(IntegrityError, match=r"a\.zip.*'README'.*the manifest"):
        download([pinned(server, "README", b"mine"), first], tmp_path)
    assert len(server.requests) == before
    equal = pinned(server, "LICENSE", b"same")
    for state in ("fetched", "present"):
        assert states(download([first, equal], tmp_path / "equal")) == [state, "present"]


def test_verify_detects_one_bit_and_the_next_download_repairs_it(
    server: Server, files: list[PinnedFile], tmp_path: Path
) -> None:
    assert states(verify(files, tmp_path)) == ["missing"] * 3
    fetch(files[0], tmp_path)  # killed before it was unpacked
    result = verify(files[:1], tmp_path)
    assert (states(result), result[0]["problems"]) == (["missing"], ["images.zip"])
    download(files, tmp_path)
    assert states(verify(files, tmp_path)) == ["intact"] * 3
    name = list(IMAGES)[50]
    (tmp_path / name).write_bytes(bytes([IMAGES[name][0] ^ 1]) + IMAGES[name][1:])
    (tmp_path / "README").write_bytes(b"A readme")
    result = verify(files, tmp_path)
    assert states(result) == ["broken", "intact", "broken"]
    assert [row["problems"] for row in result] == [[name], [], ["README"]]
    own = {f"{path}.replaced": (tmp_path / path).read_bytes() for path in (name, "README")}
    readme, before = server.routes.pop("/README"), (tmp_path / "README").read_bytes()
    with pytest.raises(NetworkError):
        download(files[2:], tmp_path)
    assert (tmp_path / "README").read_bytes() == before
    server.routes["/README"] = readme
    assert states(download(files, tmp_path)) == ["fetched", "present", "fetched"]
    assert content(tmp_path) == WANTED | own  # the user may have changed them


def test_needed_space_is_checked_first_and_has_the_archives(server: Server, tmp_path: Path) -> None:
    def file_of(name: str, archive: int, content: int) -> PinnedFile:
        return PinnedFile(name, server.url, "0" * 64, archive, unpack=True, unpacked_bytes=content)

    files = [file_of("a.zip", 10, 30), file_of("b.zip", 20, 40)]
    assert needed_bytes(files, tmp_path, keep_archives=False) == 30 + 20 + 40
    assert needed_bytes(files, tmp_path, keep_archives=True) == 10 + 30 + 20 + 40
    with pytest.raises(DiskError):
        download([file_of("a.zip", 10, 1 << 60)], tmp_path / "data")
    assert server.requests == []
    assert not (tmp_path / "data").exists()


CONTENT = {
    "train2017/000000000009.jpg": random.Random(1).randbytes(3000),
    "train2017/000000000025.jpg": random.Random(2).randbytes(5000),
    "annotations/instances_train2017.json": b'{"images": []}' * 20,
}


def unzip(folder: Path, archive: bytes) -> list[Entry]:
    """Unpack `archive`, which is in `folder`, into `folder/data`."""
    folder.mkdir(exist_ok=True)
    path = folder / "a.zip"
    path.write_bytes(archive)
    data = folder / "data"
    return unpack(path, data, data / ".unpacking", progress=no_progress)


def refused(folder: Path, archive: bytes, match: str = "") -> None:
    """Unpacking fails with 5 and leaves only the archive in its folder."""
    with pytest.raises(IntegrityError, match=match or None):
        unzip(folder, archive)
    assert list(tree(folder)) == ["a.zip"]
    assert not (folder / "data").exists() or not list((folder / "data").iterdir())


def with_field(archive: bytes, position: int, value: int, size: int = 4) -> bytes:
    """Change a field of every entry in the archive's directory."""
    content = bytearray(archive)
    for match in re.finditer(b"PK\1\2", archive):
        start = match.start() + position
        content[start : start + size] = value.to_bytes(size, "little")
    return bytes(content)


def test_content_lands_in_place(tmp_path: Path) -> None:
    more = {"/": b"", "./": b"", "./a/": b"", "a/b/": b"", "./a/c": b"", "top": b"x"}
    entries = unzip(tmp_path, zipped(CONTENT | more))
    found = tree(tmp_path / "data")
    assert found == CONTENT | {"a/c": b"", "top": b"x"}
    assert (tmp_path / "data" / "a" / "b").is_dir()
    assert sorted(entries) == sorted((n, len(data), zlib.crc32(data)) for n, data in found.items())
    (tmp_path / "data" / "annotations" / "mine.json").write_bytes(b"mine")
    (tmp_path / "data" / "top").write_bytes(b"old")
    unzip(tmp_path, zipped(CONTENT | more))
    mine = {"annotations/mine.json": b"mine", "top.replaced": b"old"}
    assert tree(tmp_path / "data") == found | mine


@pytest.mark.parametrize("disk", [None, "/dev/shm"])
def test_a_linked_folder_gets_the_files(tmp_path: Path, disk: str | None) -> None:
    if disk is not None and not Path(disk).is_dir():
        pytest.skip("needs a second disk")
    with tempfile.TemporaryDirectory(dir=disk) as elsewhere:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train2017").symlink_to(elsewhere)
        (Path(elsewhere) / "000000000009.jpg").write_bytes(b"old")
        content = CONTENT | {"train2017/more/a.jpg": b"1"}
        unzip(tmp_path, zipped(content))
        assert (tmp_path / "data" / "train2017").is_symlink()
        assert {f"train2017/{k}": v for k, v in tree(Path(elsewhere)).items()} == {
            "train2017/000000000009.jpg.replaced": b"old",
            **{name: data for name, data in content.items() if name.startswith("train2017/")},
        }
    assert not (tmp_path / "data" / ".unpacking").exists()


NAMES = (
    *("../out", "a/../../out", "a/..", "/etc/passwd", "//out", "a\\..\\out", "C:\\out"),
    *("././a", "./.ssdctl/a", "a//b", ".ssdctl/a.zip.json", "x" * 300, "/".join(["x" * 200] * 25)),
)
DATA = CONTENT["train2017/000000000009.jpg"]
ONE = zipped({"a": b"1"})
HOSTILE: dict[str, tuple[bytes, str]] = {
    **{f"name {name:.30}": (zipped({"fine": b"1", name: b"2"}), "") for name in NAMES},
    "NUL": (zipped({"fine": b"1", "aXb": b"2"}).replace(b"aXb", b"a\0b"), "not a plain path"),
    **{
        f"kind {kind:o}": (zipped({"a": b"1"}, external_attr=kind << 16), "link or a device")
        for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR)
    },
    "a name twice": (zipped({"same1": b"1", "same2": b"2"}).replace(b"same2", b"same1"), "same1"),
    **{
        f"a file that is a folder: {order}": (zipped(dict.fromkeys(order, b"")), "'a")
        for order in (("a", "a/b"), ("a/b", "a"), ("a/", "a"), ("a/b/c", "a/b"))
    },
    **{
        f"{size} bytes instead of 3,000": (with_field(zipped({"a": DATA}), 24, size), "")
        for size in (0, 10, 2999, 3001, 100_000)
    },
    "a stored file of two sizes": (
        with_field(zipped({"a": b"12345"}, compress_type=zipfile.ZIP_STORED), 24, 4), ""
    ),
    "a folder with content": (with_field(zipped({"a/": b""}), 24, 9), "the folder 'a/' has"),
    "overlapping entries": (with_field(zipped({"a": DATA, "b": DATA}), 20, 5000), "overlap"),
    "an encrypted entry": (with_field(ONE, 8, 1, 2), "encrypted"),
    "another method": (with_field(ONE, 10, zipfile.ZIP_LZMA, 2), "method 14"),
    "another CRC": (with_field(ONE, 16, 12345), "CRC"),
    "a bomb": (zipped({"zeros": bytes(3_000_000)}), "bomb"),
    "nothing": (zipped({"a/": b""}), "no files"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_15_hostile_archives(tmp_path: Path, name: str) -> None:
    refused(tmp_path, *HOSTILE[name])


def test_names_without_the_flag_of_utf8(tmp_path: Path) -> None:
    utf8 = "ü".encode()
    for system, name, expected in ((3, utf8, "ü"), (3, b"\x81_", "ü_"), (0, utf8, "├╝")):
        unzip(tmp_path, zipped({"a__": b""}, create_system=system).replace(b"__", name))
        assert (tmp_path / f"data/a{expected}").is_file()


def test_15_too_many_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_ENTRIES", 2)
    refused(tmp_path, zipped(CONTENT), "3 entries are too many")


def test_16_cut_anywhere(tmp_path: Path) -> None:
    archive = zipped(CONTENT)
    dice = random.Random(0)
    cuts = {0, 1, len(archive) - 1, len(archive) - 21, len(archive) - 22}
    for cut in sorted(cuts | {dice.randrange(len(archive)) for _ in range(40)}):
        refused(tmp_path, archive[:cut])
