"""`ssdctl runs`, and the commands that use the newest run."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
from conftest import Cli

import ssdctl
from ssdctl.runtime.system import processor


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
    assert new["ap"] == ssdctl.Run("runs/new").figures["AP"]
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
    Path("none").mkdir()
    assert (cli("runs", "none").code, json.loads(cli("runs", "none", "--json").out)) == (0, [])


def test_a_plan_names_the_time_at_the_speed_of_a_similar_run(cli: Cli, folder: Path) -> None:
    def length(*options: str) -> str:
        data = ["--data", "absent", "--fake-data", "--device", "cpu", "--backbone-weights", "none"]
        lines = cli("train", *data, *options, "--dry-run").out.splitlines()
        return next(line for line in lines if line.startswith("length"))

    settings = (folder / "new" / "config.toml").read_text()
    precision = "bf16" if 'precision = "bf16"' in settings else "fp32"
    similar = ["--backbone", "tiny", f"--{precision}"]
    assert length(*similar).endswith("runs/sweep/deep")
    for path in ("sweep/deep", "new"):
        shutil.rmtree(folder / path)
    assert length(*similar).endswith("runs/old")
    other = "bf16" if precision == "fp32" else "fp32"
    for options in (
        ["--backbone", "tiny", f"--{other}"],
        ["--backbone", "resnet18", f"--{precision}"],
    ):
        assert "img/s" not in length(*options)


def test_a_plan_settles_the_precision_as_the_run_would(cli: Cli) -> None:
    def device(*options: str) -> str:
        result = cli("train", "--data", "absent", "--fake-data", "--dry-run", *options)
        return next(line for line in result.out.splitlines() if line.startswith("device"))

    best = "bf16" if processor()[1] else "fp32"
    assert device("--device", "cpu").endswith(f"precision {best}")
    assert device("--device", "cpu", "--preset", "nvidia-r50").endswith(f"precision {best}")
    assert device("--device", "hpu").endswith("precision bf16")
    assert device("--fp16").endswith("precision fp16")  # maybe for another machine


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
