"""What a system without parts of Linux gets: no CPU affinity, `fcntl` or `resource`, no /proc. They
are hidden in a child process; other systems were not tried."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssdctl.runtime.system import (
    UNLIMITED,
    is_process_running,
    peak_memory_bytes,
    resource_limit,
    usable_cpus,
)

HIDDEN = """
import os, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
del os.sched_getaffinity
"""


def run_hidden(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", HIDDEN + code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_this_system() -> None:
    assert len(usable_cpus()) == len(os.sched_getaffinity(0))
    assert peak_memory_bytes() > 10 << 20
    limits = resource_limit("NOFILE")
    assert limits is not None
    assert limits[0] == UNLIMITED or limits[0] > 0
    assert resource_limit("NOTHING") is None
    assert is_process_running(os.getpid())
    process = subprocess.Popen(["true"])
    process.wait()
    assert not is_process_running(process.pid)


def test_helpers_without_the_modules(tmp_path: Path) -> None:
    run_hidden(
        """
from pathlib import Path
from ssdctl import files
from ssdctl.distributed.addresses import own_addresses
from ssdctl.doctor.machine import _locked_memory, _open_files
from ssdctl.launch.node import read_node
from ssdctl.runtime import system
from ssdctl.runtime.cores import usable_cores
assert len(system.usable_cpus()) == os.cpu_count()
assert usable_cores() >= 1 and read_node().cores >= 1
assert own_addresses() == {}
assert system.peak_memory_bytes() == 0 and system.resource_limit("AS") is None
assert _open_files() is None and _locked_memory(None) is None
with files.lock(Path(sys.argv[1])):  # it counts as locked
    assert Path(sys.argv[1]).exists()
""",
        tmp_path / ".lock",
    )


COMMANDS = """
from ssdctl.cli.main import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""


def test_commands_without_the_modules(tmp_path: Path) -> None:
    run_hidden(
        COMMANDS,
        "download --dataset shapes --dest data --images 4 --val-images 2",
        "prepare --data data",
    )
    assert (tmp_path / "data/prepared/report.json").is_file()


@pytest.mark.slow
def test_training_without_the_modules(tmp_path: Path) -> None:
    run_hidden(
        COMMANDS,
        "download --dataset shapes --dest data --images 4 --val-images 2",
        "train --data data --out run --steps 1 --bs 2 --backbone tiny --backbone-weights none "
        "--warmup 1st --device cpu",
        "evaluate run --device cpu",
    )
    assert (tmp_path / "run/checkpoints/best.pt").is_file()
