"""A dataset's download in processes: two at once, killed, and resumed."""

import random
import time
from pathlib import Path

import pytest
from download.http_server import Server
from download.zips import content, pinned, start_download, zipped


@pytest.mark.parametrize("num_kills", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_kills(server: Server, tmp_path: Path, num_kills: int) -> None:
    """Fault 13 in all stages, from the first byte to after the end."""
    dice = random.Random(num_kills)
    many = {f"train2017/{i:06d}": dice.randbytes(500) for i in range(1500)}
    archive = pinned(server, "many.zip", zipped(many), unpack=True, pause_s=0.04)
    for _ in range(num_kills):
        process = start_download(archive, tmp_path, connections=2)
        process.stdout.readline()
        time.sleep(dice.random() * 0.8)
        process.kill()
        process.communicate()
        if dice.random() < 0.2:
            (tmp_path / "train2017" / "000000").unlink(missing_ok=True)  # start again
    assert start_download(archive, tmp_path).communicate()[1] == ""
    assert content(tmp_path) == many
    assert sorted(p.name for p in tmp_path.iterdir()) == [".ssdctl", "train2017"]
    assert [p.name for p in (tmp_path / ".ssdctl").iterdir()] == ["many.zip.json"]


def test_two_downloads_at_once(server: Server, tmp_path: Path) -> None:
    """Fault 12 with archives: one works, the other waits and has nothing to do."""
    images = {f"train2017/{i:06d}": random.Random(i).randbytes(2000) for i in range(100)}
    archive = zipped(images)
    pin = pinned(server, "images.zip", archive, unpack=True, pause_s=0.2)
    both = [start_download(pin, tmp_path) for _ in range(2)]
    outcomes = sorted(process.communicate()[0].split()[-1] for process in both)
    assert outcomes == ["fetched", "present"]
    assert content(tmp_path) == images
    assert server.body_bytes == len(archive)


def test_a_resume_fetches_at_most_a_twentieth_twice(server: Server, tmp_path: Path) -> None:
    """Ended in the middle, with several connections at work: 1.05 times the bytes in all."""
    data = random.Random(0).randbytes(24_000_000)
    pin = pinned(server, "a.bin", data, pause_s=0.01)
    process = start_download(pin, tmp_path, connections=2)
    while server.body_bytes < len(data) / 2:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert server.body_bytes < len(data)
    assert start_download(pin, tmp_path, connections=2).communicate()[0].split()[-1] == "fetched"
    assert (tmp_path / "a.bin").read_bytes() == data
    assert server.body_bytes <= 1.05 * len(data)
