"""Evaluation on several ranks is evaluation on one; an error of one rank is the error of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Cli, Result

from ssdctl.distributed.ranks import free_port

LOW = ("--score-threshold", "0.01")


def evaluate_on(ranks: int, *arguments: object) -> list[Result]:
    """Run `ssdctl evaluate` on ranks. No forks: hotcoco's threads would not exist in them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ssdctl", "evaluate", *map(str, arguments)],
            env={**os.environ, **common, "WORLD_SIZE": str(ranks), "RANK": r, "LOCAL_RANK": r},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in map(str, range(ranks))
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in processes]
    return [Result(p.returncode, *output) for p, output in zip(processes, outputs, strict=True)]


def by_image(name: str) -> list[tuple[object, ...]]:
    rows = json.loads(Path(name).read_text())
    return sorted((r["image_id"], -r["score"], r["category_id"], *r["bbox"]) for r in rows)


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=pytest.mark.slow(in_ci=True)), pytest.param(5, marks=pytest.mark.slow)],
)
def test_ranks_equal_one(cli: Cli, checkpoint: Path, ranks: int) -> None:
    """Nine images: they divide by neither number."""
    one = cli("evaluate", checkpoint, "--json", "--device", "cpu", *LOW, "--detections", "one.json")
    assert one.code == 0, one.err
    options = ("--json", "--device", "cpu", *LOW, "--detections", "several.json")
    several = evaluate_on(ranks, checkpoint, *options)
    assert [rank.code for rank in several] == [0] * ranks, several
    expected, actual = json.loads(one.out), json.loads(several[0].out)
    assert actual["images"] == 9
    assert actual["detections"] == expected["detections"] > 0
    for key, value in expected.items():
        if isinstance(value, float):
            assert actual[key] == pytest.approx(value, abs=1e-9), key
    assert by_image("several.json") == by_image("one.json")


@pytest.mark.slow
def test_nan_on_every_rank_is_reported_once(checkpoint: Path) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    payload["model"]["box_heads.0.bias"][0] = float("nan")
    torch.save(payload, "bad.pt")
    ranks = evaluate_on(2, "bad.pt", "--device", "cpu")
    assert [rank.code for rank in ranks] == [7, 7], ranks
    assert sum(rank.err.count("NaN or infinite") for rank in ranks) == 1
    assert [rank.out for rank in ranks] == ["", ""]
