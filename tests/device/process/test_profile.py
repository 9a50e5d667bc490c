"""`--profile FIRST,LAST`: the profiled steps, and the files in the run folder."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import TINY_RUN, Cli
from tiny_network import batch, build_training

from ssdctl.device import open_device
from ssdctl.distributed import SINGLE_PROCESS
from ssdctl.training.throughput import StepProfiler

CPU = open_device("cpu")


def test_profile_contains_the_steps_from_first_to_last(
    shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    result = cli(
        "train", "--data", shapes, "--out", run, "--steps", 4, "--profile", "2,3", *TINY_RUN.split()
    )
    assert result.code == 0, result.err
    assert "profile of steps 2 to 3" in result.err
    events = json.loads((run / "profile/trace.json").read_text())["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert names.count("wait: next batch") == 2
    assert names.count("wait: device, at a log point") == 2
    assert sum("Optimizer.step#" in name for name in names) == 2
    table = (run / "profile/table.txt").read_text()
    assert "aten::convolution_backward" in table
    assert "wait: next batch" in table


def test_profile_ends_with_the_run(tmp_path: Path) -> None:
    _, _, step = build_training(CPU)
    profiler = StepProfiler("2,9", tmp_path, CPU, SINGLE_PROCESS)
    for number in (1, 2, 3):
        profiler.before(number)
        step([batch()], 1e-3)
        profiler.after(number, is_last=number == 3)
        assert (tmp_path / "trace.json").exists() == (number == 3)
    assert not list(tmp_path.rglob("*.tmp"))


def test_invalid_profile_ranges_are_refused(cli: Cli) -> None:
    for value, words in (
        ("5,3", "step 3 is before step 5"),
        ("0,3", "--profile"),
        ("7", "--profile 50,53"),
    ):
        result = cli("train", "--profile", value)
        assert result.code == 2
        assert words in result.err
