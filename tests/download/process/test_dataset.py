"""A dataset's download: several files, unpacked archives, killed and resumed."""

from __future__ import annotations

import random
import signal
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
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(dice.random() * 0.8)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if dice.random() < 0.2:
            (tmp_path / "train2017" / "000000").unlink(missing_ok=True)  # start again
    assert start_download(archive, tmp_path).communicate()[1] == ""
    assert content(tmp_path) == many
    assert sorted(p.name for p in tmp_path.iterdir()) == [".ssdctl", "train2017"]
    assert [p.name for p in (tmp_path / ".ssdctl").iterdir()] == ["many.zip.json"]
