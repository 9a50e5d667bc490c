"""A dataset's download: several files, unpacked archives, killed and resumed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from download.http_server import Server
from download.zips import content, pinned, zipped


class TestKills:
    """Fault 13 in all stages: fetching, unpacking, publishing."""

    def test_a_few(self, server: Server, tmp_path: Path) -> None:
        self._kill(server, tmp_path, num_kills=4)

    @pytest.mark.slow
    def test_many(self, server: Server, tmp_path: Path) -> None:
        self._kill(server, tmp_path, num_kills=50)

    @staticmethod
    def _kill(server: Server, dest: Path, num_kills: int) -> None:
        """Kill at random moments, from the first byte to after the end."""
        dice = random.Random(num_kills)
        many = {f"train2017/{i:06d}": dice.randbytes(500) for i in range(1500)}
        archive = pinned(server, "many.zip", zipped(many), unpack=True, pause_s=0.04)
        program = f"""
from pathlib import Path
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.dataset import download
from ssdctl.download.pinned_files import PinnedFile
print("go", flush=True)
download([PinnedFile(*{tuple(archive)!r})], Path({str(dest)!r}), connections=2)
"""
        for _ in range(num_kills):
            process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(dice.random() * 0.8)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            if dice.random() < 0.2:
                (dest / "train2017" / "000000").unlink(missing_ok=True)  # start again
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
        assert content(dest) == many
        assert sorted(p.name for p in dest.iterdir()) == [".ssdctl", "train2017"]
        assert [p.name for p in (dest / ".ssdctl").iterdir()] == ["many.zip.json"]
