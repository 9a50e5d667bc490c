"""`launch ... -- doctor --collectives`: all ranks, over gloo; and what its figures say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdctl.distributed.ranks import free_port
from ssdctl.doctor.probes import Card, _cards, _network


def test_the_slowest_rank_is_named() -> None:
    cards = [Card("a", 0, "Card", 9e12), Card("b", 0, "Card", 5e12), Card("b", 1, "Card", 1e13)]
    check = _cards(cards)
    assert check.state == "warn"
    assert "rank 1 (device 0 of b)" in check.detail
    assert "5.00 to 10.00 TFLOP/s" in check.detail
    assert _cards([card._replace(flops=9e12) for card in cards]).state == "ok"
    # Each of three ranks sends 4/3 of the bytes.
    assert "2.00 GB/s per rank" in _network(1_500_000_000, 1.0, cards).detail
    assert _network(0, 0.0, cards[:1]).remedy


@pytest.mark.slow(in_ci=True)
def test_nodes_of_an_indexed_job_meet_at_pod_0(tmp_path: Path) -> None:
    """Two launches, as the pods run them: rank 0 is in pod 0, whichever starts first."""
    argv = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", "--nodes", "2"]
    argv += ["--launcher", "torchrun", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    argv += ["--", "doctor", "--collectives", "--json"]
    pods: list[subprocess.Popen[str]] = []
    for number in ("1", "0"):
        environment = {**os.environ, "JOB_COMPLETION_INDEX": number}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pods.append(subprocess.Popen(argv, env=environment, cwd=tmp_path, text=True, **streams))
    answers = [pod.communicate(timeout=150) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], answers
    assert answers[0][0] == ""
    checks = {check["name"]: check for check in json.loads(answers[1][0])}
    assert {check["state"] for check in checks.values()} <= {"ok", "warn"}
    assert "MB over 2 ranks" in checks["all-reduce"]["detail"]
