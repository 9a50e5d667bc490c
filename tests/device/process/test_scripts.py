"""Scripts of benchmarks/ without a GPU: Triton kernels for an H100; on_gpu.sh and on_hpu.sh."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdctl.runtime.packages import torch_release

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch_release() < (2, 15),
    reason="the scripts replace the driver queries of torch 2.15 and Triton",
)


def run(script: str, *options: str) -> Any:
    command = [sys.executable, BENCHMARKS / script, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@needs_triton
@pytest.mark.slow
def test_the_parts_of_a_step_without_a_backbone_are_right() -> None:
    """Interpreted, with every form of model/fused.py: as close to fp64 as PyTorch's own kernels."""
    rows = {row["name"]: row for row in run("run_kernels.py", "--parts")}
    assert {name.split()[0] for name in rows} == {
        "matcher", "loss", "normalization", "box", "decoding", "heads", "stem"
    }  # fmt: skip
    assert all(row["is_right"] and row["launches"] for row in rows.values())


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_complete_step_is_right(precision: str) -> None:
    (row,) = run("run_kernels.py", "--backbone", "resnet18", "--precision", precision)
    assert row["is_right"]
    assert row["launches"] > 100


@needs_triton
@pytest.mark.slow
def test_a_step_has_no_atomics_no_spills_and_only_aligned_channels() -> None:
    counts = run("codegen.py", "--backbone", "resnet18", "--bs", "16", "--check", "--sm", "90")
    assert counts["atomics"] == counts["unaligned_convolutions"] == 0
    assert counts["launches_forward"] > 50


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
