"""on_gpu.sh and on_hpu.sh of benchmarks/ without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
IN_CI = pytest.mark.slow(in_ci=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("script", "parts"),
    [
        pytest.param("on_gpu.sh", ["benchmark train", "resume", "DALI"], marks=IN_CI),
        pytest.param("on_hpu.sh", ["versions", "forms of model/fused.py"], marks=IN_CI),
        pytest.param("on_gpu.sh", [], marks=pytest.mark.slow),
    ],
)
def test_its_parts_run_on_a_cpu(tmp_path: Path, script: str, parts: list[str]) -> None:
    command = [BENCHMARKS / script, "--out", tmp_path, "--slower", "4"]
    command += ["--only", *parts] if parts else []
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    text = (tmp_path / "RESULTS-cpu.md").read_text()
    assert done.returncode == 0, text
    assert "| forms of model/fused.py | skipped |" in text or "| resume | ok |" in text
