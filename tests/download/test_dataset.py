"""A dataset's download: several files, unpacked archives, killed and resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from download.http_server import Reply, Request, Server, file
from download.zips import content, pinned, tree, zipped

from ssdctl.download.dataset import download, needed_bytes, plan, verify
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import DiskError, IntegrityError, NetworkError

IMAGES = {f"train2017/{i:012d}.jpg": random.Random(i).randbytes(2000) for i in range(100)}


NOTES = {"annotations/instances_train2017.json": b"[1, 2, 3]" * 10}


PLAIN = b"a readme"


@pytest.fixture
def files(server: Server) -> list[PinnedFile]:
    return [
        pinned(server, "images.zip", zipped(IMAGES), unpack=True),
        pinned(server, "notes.zip", zipped(NOTES), unpack=True),
        pinned(server, "README", PLAIN),
    ]


def states(results: list[dict[str, object]]) -> list[object]:
    return [row["state"] for row in results]


WANTED = IMAGES | NOTES | {"README": PLAIN}


def test_archives_are_unpacked_and_removed(files: list[PinnedFile], tmp_path: Path) -> None:
    done = download(files, tmp_path)
    assert content(tmp_path) == WANTED
    assert states(done) == ["fetched"] * 3
    assert done[0]["files"] == 100


def test_archives_may_be_kept(files: list[PinnedFile], tmp_path: Path) -> None:
    download(files, tmp_path, keep_archives=True)
    assert set(content(tmp_path)) == set(WANTED) | {"images.zip", "notes.zip"}


def test_a_second_run_fetches_nothing(
    server: Server, files: list[PinnedFile], tmp_path: Path
) -> None:
    download(files, tmp_path)
    before = len(server.requests)
    assert states(download(files, tmp_path)) == ["present"] * 3
    assert len(server.requests) == before
    assert states(plan(files, tmp_path, None)) == ["present"] * 3


def test_a_lost_image_is_fetched_again(
    server: Server, files: list[PinnedFile], tmp_path: Path
) -> None:
    download(files, tmp_path)
    lost = tmp_path / next(iter(IMAGES))
    lost.unlink()
    assert states(download(files, tmp_path)) == ["fetched", "present", "present"]
    assert content(tmp_path) == WANTED


def test_another_version_of_an_archive_is_fetched(server: Server, tmp_path: Path) -> None:
    download([pinned(server, "notes.zip", zipped(NOTES), unpack=True)], tmp_path)
    changed_notes = {name: content + b"more" for name, content in NOTES.items()}
    newer = pinned(server, "notes.zip", zipped(changed_notes), unpack=True)
    assert states(plan([newer], tmp_path, None)) == ["missing"]
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
    assert set(IMAGES) <= before
    assert not any(name.startswith(".ssdctl/images.zip.json") for name in before - {LOCK})
    assert (tmp_path / ".ssdctl/images.zip.json").is_file()


LOCK = ".ssdctl/images.zip.json.lock"


def test_content_that_does_not_fit_is_seen_before_it_is_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest need not list the size of an archive's content; the archive itself does."""
    archive = pinned(server, "zeros.zip", zipped({"a": bytes(1000) + IMAGES_BYTES}), unpack=True)
    free = SPARE_BYTES + 3 * (archive.bytes or 0)
    monkeypatch.setattr("ssdctl.download.fetch.free_bytes", lambda _: free)
    with pytest.raises(DiskError, match=r"zeros\.zip"):
        download([archive], tmp_path)
    assert list(content(tmp_path)) == ["zeros.zip"]


IMAGES_BYTES = random.Random(0).randbytes(3000) * 20  # packs to a twentieth


def test_verify_detects_one_bit_and_the_next_download_repairs_it(
    files: list[PinnedFile], tmp_path: Path
) -> None:
    download(files, tmp_path)
    assert states(verify(files, tmp_path)) == ["intact"] * 3
    name = list(IMAGES)[50]
    (tmp_path / name).write_bytes(bytes([IMAGES[name][0] ^ 1]) + IMAGES[name][1:])
    (tmp_path / "README").write_bytes(b"A readme")
    result = verify(files, tmp_path)
    assert states(result) == ["broken", "intact", "broken"]
    assert [row["problems"] for row in result] == [[name], [], ["README"]]
    download(files, tmp_path)
    assert content(tmp_path) == WANTED


def test_verify_of_nothing(files: list[PinnedFile], tmp_path: Path) -> None:
    assert states(verify(files, tmp_path)) == ["missing"] * 3


def test_an_unsafe_archive_publishes_nothing(server: Server, tmp_path: Path) -> None:
    bad = pinned(server, "bad.zip", zipped(IMAGES | {"../out": b""}), unpack=True)
    with pytest.raises(IntegrityError):
        download([bad], tmp_path / "data")
    assert list(content(tmp_path)) == ["data/bad.zip"]


def test_another_number_of_images_is_refused(server: Server, tmp_path: Path) -> None:
    archive = pinned(server, "images.zip", zipped(IMAGES), unpack=True)
    with pytest.raises(IntegrityError, match="101"):
        download([archive._replace(num_files=101)], tmp_path)


def test_space_for_archive_and_content_is_checked_first(server: Server, tmp_path: Path) -> None:
    archive = pinned(server, "images.zip", zipped(IMAGES), unpack=True)
    with pytest.raises(DiskError, match="the download needs"):
        download([archive._replace(unpacked_bytes=1 << 60)], tmp_path / "data")
    assert server.requests == []
    assert not (tmp_path / "data").exists()


def test_needed_space_counts_archives_while_they_are_there(tmp_path: Path) -> None:
    def file_of(name: str, archive: int, content: int) -> PinnedFile:
        url = f"http://127.0.0.1/{name}"
        return PinnedFile(name, url, "0" * 64, archive, unpack=True, unpacked_bytes=content)

    files = [file_of("a.zip", 10, 30), file_of("b.zip", 20, 40)]
    assert needed_bytes(files, tmp_path, keep_archives=False) == 30 + 20 + 40
    assert needed_bytes(files, tmp_path, keep_archives=True) == 10 + 30 + 20 + 40


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
    program = f"""
from pathlib import Path
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.dataset import download
from ssdctl.download.pinned_files import PinnedFile
print(download([PinnedFile(*{tuple(pin)!r})], Path({str(tmp_path)!r}))[0]["state"])
"""
    both = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outcomes = sorted(process.communicate()[0].strip() for process in both)
    assert outcomes == ["fetched", "present"]
    assert content(tmp_path) == IMAGES
    assert server.body_bytes == len(archive)


def test_resume_costs_little(server: Server, tmp_path: Path) -> None:
    """What arrived before a refusal is not fetched again."""
    data = random.Random(0).randbytes(3_000_000)
    pin = pinned(server, "a.bin", data)
    complete = file(data)

    def failing(request: Request) -> Reply:
        return complete(request) if request.number < 2 else Reply(400)

    server.route("/a.bin", failing)
    with pytest.raises(NetworkError):
        download([pin], tmp_path, connections=1)
    assert 0 < server.body_bytes < len(data)
    server.route("/a.bin", complete)
    download([pin], tmp_path, connections=1)
    assert server.body_bytes == len(data)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_resume_fetches_at_most_a_twentieth_twice(
    server: Server, tmp_path: Path, sent: signal.Signals
) -> None:
    """Ended in the middle, with several connections at work: 1.05 times the bytes in all."""
    data = random.Random(0).randbytes(24_000_000)
    pin = pinned(server, "a.bin", data, pause_s=0.01)
    program = f"""
from pathlib import Path
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.dataset import download
from ssdctl.download.pinned_files import PinnedFile
download([PinnedFile(*{tuple(pin)!r})], Path({str(tmp_path)!r}), connections=4)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    while server.body_bytes < len(data) / 2:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(sent)
    process.wait()
    assert server.body_bytes < len(data)
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (tmp_path / "a.bin").read_bytes() == data
    assert server.body_bytes <= 1.05 * len(data)
