"""What the system grants, and what one without CPU affinity (macOS) gets: it is hidden in a child
process; other systems were not tried."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY_RUN, Cli

from ssdctl.runtime.system import (
    is_process_running,
    peak_memory_bytes,
    usable_cpus,
)

HIDDEN = """
import os, sys
del os.sched_getaffinity
"""


def run_hidden(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", HIDDEN + code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_this_system() -> None:
    assert len(usable_cpus()) == len(os.sched_getaffinity(0))
    assert peak_memory_bytes() > 10 << 20
    assert is_process_running(os.getpid())
    process = subprocess.Popen(["true"])
    process.wait()
    assert not is_process_running(process.pid)


def test_cores_without_affinity() -> None:
    run_hidden(
        """
from ssdctl.launch import read_node
from ssdctl.runtime import system
from ssdctl.runtime.system import usable_cores
assert len(system.usable_cpus()) == os.cpu_count()
assert usable_cores() >= 1 and read_node().cores >= 1
"""
    )


COMMANDS = """
from ssdctl.cli.main import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, (line, end.code)
"""


PREPARE = (
    "download --dataset shapes --dest data --images 4 --val-images 2",
    "prepare --data data",
)
TRAIN = (
    "train --data data --out run --steps 1 --bs 2 --backbone tiny --backbone-weights none "
    "--warmup 1st --device cpu",
    "evaluate run --device cpu",
)


@pytest.mark.parametrize(
    ("commands", "written"),
    [
        (PREPARE, "data/prepared/report.json"),
        pytest.param(PREPARE + TRAIN, "run/checkpoints/best.pt", marks=pytest.mark.slow),
    ],
)
def test_commands_without_affinity(tmp_path: Path, commands: tuple[str, ...], written: str) -> None:
    run_hidden(COMMANDS, *commands)
    assert (tmp_path / written).is_file()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="signal masks")
def test_a_clock_that_is_set_back(
    shapes: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations are measured by the monotonic clock; the wall clock is only a label."""
    seconds = itertools.count(2_000_000_000, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    monkeypatch.setattr(time, "time_ns", lambda: next(seconds) * 10**9)
    run = tmp_path / "run"
    train = ("train", "--data", shapes, "--out", run, *TINY_RUN.split(), "--save-every", "1min")
    for steps in (2, 3):
        result = cli(*train, "--steps", steps)
        assert result.code == 0, result.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert all(line["images_per_second"] >= 0 for line in trained)
