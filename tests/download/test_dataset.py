"""A dataset's download: several files, unpacked archives, killed and resumed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from download.http_server import Reply, Server
from download.zips import content, pinned, start_download, tree, zipped

from ssdctl.download.dataset import download, list_files, needed_bytes, verify
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import DiskError, NetworkError

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
    done = download(files, tmp_path)
    assert content(tmp_path) == WANTED
    assert states(done) == ["fetched"] * 3
    assert done[0]["files"] == 100
    before = len(server.requests)
    assert states(download(files, tmp_path)) == ["present"] * 3
    assert len(server.requests) == before
    assert states(list_files(files, tmp_path, None)) == ["present"] * 3
    (tmp_path / next(iter(IMAGES))).unlink()
    kept = download(files, tmp_path, keep_archives=True)
    assert states(kept) == ["fetched", "present", "present"]
    assert set(content(tmp_path)) == set(WANTED) | {"images.zip"}


def test_another_version_of_an_archive_is_fetched(server: Server, tmp_path: Path) -> None:
    download([pinned(server, "notes.zip", zipped(NOTES), unpack=True)], tmp_path)
    changed_notes = {name: content + b"more" for name, content in NOTES.items()}
    newer = pinned(server, "notes.zip", zipped(changed_notes), unpack=True)
    assert states(list_files([newer], tmp_path, None)) == ["missing"]
    assert states(download([newer], tmp_path)) == ["fetched"]
    assert content(tmp_path) == changed_notes


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


def test_verify_detects_one_bit_and_the_next_download_repairs_it(
    files: list[PinnedFile], tmp_path: Path
) -> None:
    assert states(verify(files, tmp_path)) == ["missing"] * 3
    download(files, tmp_path)
    assert states(verify(files, tmp_path)) == ["intact"] * 3
    name = list(IMAGES)[50]
    (tmp_path / name).write_bytes(bytes([IMAGES[name][0] ^ 1]) + IMAGES[name][1:])
    (tmp_path / "README").write_bytes(b"A readme")
    result = verify(files, tmp_path)
    assert states(result) == ["broken", "intact", "broken"]
    assert [row["problems"] for row in result] == [[name], [], ["README"]]
    assert states(download(files, tmp_path)) == ["fetched", "present", "fetched"]
    assert content(tmp_path) == WANTED


def test_needed_space_is_checked_first_and_counts_archives_while_they_are_there(
    server: Server, tmp_path: Path
) -> None:
    def file_of(name: str, archive: int, content: int) -> PinnedFile:
        return PinnedFile(name, server.url, "0" * 64, archive, unpack=True, unpacked_bytes=content)

    files = [file_of("a.zip", 10, 30), file_of("b.zip", 20, 40)]
    assert needed_bytes(files, tmp_path, keep_archives=False) == 30 + 20 + 40
    assert needed_bytes(files, tmp_path, keep_archives=True) == 10 + 30 + 20 + 40
    with pytest.raises(DiskError):
        download([file_of("a.zip", 10, 1 << 60)], tmp_path / "data")
    assert server.requests == []
    assert not (tmp_path / "data").exists()


def test_the_first_trouble_ends_it_and_keeps_what_is_done(
    server: Server, files: list[PinnedFile], tmp_path: Path
) -> None:
    server.route("/notes.zip", lambda _: Reply(404))
    with pytest.raises(NetworkError):
        download(files, tmp_path)
    assert content(tmp_path) == IMAGES


def test_two_downloads_at_once(server: Server, tmp_path: Path) -> None:
    """Fault 12 with archives: one works, the other waits and has nothing to do."""
    archive = zipped(IMAGES)
    pin = pinned(server, "images.zip", archive, unpack=True, pause_s=0.2)
    both = [start_download(pin, tmp_path) for _ in range(2)]
    outcomes = sorted(process.communicate()[0].split()[-1] for process in both)
    assert outcomes == ["fetched", "present"]
    assert content(tmp_path) == IMAGES
    assert server.body_bytes == len(archive)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_resume_fetches_at_most_a_twentieth_twice(
    server: Server, tmp_path: Path, sent: signal.Signals
) -> None:
    """Ended in the middle, with several connections at work: 1.05 times the bytes in all."""
    data = random.Random(0).randbytes(24_000_000)
    pin = pinned(server, "a.bin", data, pause_s=0.01)
    process = start_download(pin, tmp_path, connections=2)
    while server.body_bytes < len(data) / 2:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(sent)
    process.communicate()
    assert server.body_bytes < len(data)
    assert start_download(pin, tmp_path, connections=2).communicate()[0].split()[-1] == "fetched"
    assert (tmp_path / "a.bin").read_bytes() == data
    assert server.body_bytes <= 1.05 * len(data)
