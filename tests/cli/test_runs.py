"""`ssdctl runs`, and the commands that use the newest run."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result

Cli = Callable[..., Result]


@pytest.fixture
def folder(tiny_run: Path) -> Path:
    """Return `runs/`: an old run, a new one, a deeper one in progress, and a broken one."""
    for number, name in enumerate(("old", "new", "sweep/deep", "broken"), 1):
        shutil.copytree(tiny_run, f"runs/{name}")
        os.utime(f"runs/{name}/metrics.jsonl", (number * 1000, number * 1000))
    Path("runs/sweep/deep/.lock").write_text(f"{os.getpid()} on {socket.gethostname()}")
    Path("runs/new/.lock").write_text(f"{2**22 + 1} on {socket.gethostname()}")  # was killed
    Path("runs/broken/config.toml").write_text("[[[")
    return Path("runs")


def test_runs_are_listed_with_the_newest_first(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = json.loads(cli("runs", "--json").out)
    assert [e["path"] for e in entries] == [
        "runs/broken", "runs/sweep/deep", "runs/new", "runs/old",
    ]  # fmt: skip
    _, deep, new, old = entries
    assert (new["data"], new["network"], new["steps"]) == ("shapes", "tiny", 3)
    assert new["ap"] == max(
        r["AP"]
        for r in map(json.loads, Path("runs/new/metrics.jsonl").read_text().splitlines())
        if r["kind"] == "eval"
    )
    assert "running" in deep["state"]
    assert new["state"] == old["state"] == ""
    assert "config.toml" in entries[0]["state"]
    monkeypatch.setenv("COLUMNS", "80")
    table = cli("runs", folder)
    assert table.code == 0
    lines = table.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(e["path"] in line for line in lines) for e in entries)
    assert json.loads(cli("runs", "runs/sweep", "--json").out) == [deep]
    assert cli("runs", "absent").code == 2


def test_no_runs(cli: Cli) -> None:
    Path("runs").mkdir()
    result = cli("runs")
    assert result.code == 0
    assert json.loads(cli("runs", "--json").out) == []


@pytest.mark.process
def test_commands_use_the_newest_run(cli: Cli, folder: Path) -> None:
    shutil.rmtree("runs/broken")
    shutil.rmtree("runs/sweep/deep/checkpoints")
    for command, run in (
        (["evaluate", "--limit", "1", "--device", "cpu"], "runs/new"),
        (["export", "--format", "mlperf", "--out", "x.pt"], "runs/new"),
        (["report"], "runs/sweep/deep"),  # needs no checkpoint
    ):
        result = cli(*command)
        assert result.code == 0, result.err
        assert result.err.splitlines()[0].endswith(f" {run}")
    shutil.move("runs/new", "elsewhere")
    shutil.rmtree("runs/old")
    for command in (["evaluate"], ["export", "--format", "mlperf", "--out", "x.pt"]):
        result = cli(*command)
        assert (result.code, result.out) == (2, "")
        assert "elsewhere" in result.err
