"""A SkyPilot task: run by bash, with the variables that SkyPilot sets and another python3."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_task_runs_torchrun_on_every_node(
    cli: Callable[..., Any], tmp_path: Path, nodes: int
) -> None:
    path = tmp_path / "job.sky.yaml"
    words = ["--gpus", 8 * nodes, "--nodes", nodes, "--data", "/data/a b$c", "--write", path]
    assert cli("launch", *words).code == 0
    task = yaml.safe_load(path.read_text())
    assert set(task) == {"name", "num_nodes", "workdir", "setup", "envs", "run"}
    assert task["num_nodes"] == nodes
    (tmp_path / "python3").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python3").chmod(0o755)
    variables = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6"}
    variables["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    argv = ["/bin/bash", "-c", task["run"]]
    argv = subprocess.check_output(argv, env=variables, text=True).splitlines()
    assert {"--nproc-per-node=8", "--data=/data/a b$c", "--device=cuda"} <= set(argv)
    static = {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.5"}
    assert (static <= set(argv)) == (nodes == 2)


@pytest.mark.parametrize("words", [["--hpus", 8], ["--gpus", 3, "--nodes", 2]])
def test_what_a_task_cannot_start(
    cli: Callable[..., Any], tmp_path: Path, words: list[Any]
) -> None:
    assert cli("launch", *words, "--write", tmp_path / "job.sky.yaml").code == 2
