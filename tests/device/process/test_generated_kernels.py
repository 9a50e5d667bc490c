"""The Triton kernels of a compiled step, generated for an H100 without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdctl.runtime.packages import torch_release

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or torch_release() < (2, 15),
    reason="the scripts replace the driver queries of torch 2.15 and Triton",
)


def run(script: str, *options: str) -> Any:
    command = [sys.executable, BENCHMARKS / script, *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_parts_of_a_step_without_a_backbone_are_right() -> None:
    """Interpreted, with every form of model/fused.py: as close to fp64 as PyTorch's own kernels."""
    rows = {row["name"]: row for row in run("run_kernels.py", "--parts")}
    assert {name.split()[0] for name in rows} == {
        "matcher", "loss", "normalization", "box", "decoding", "heads", "stem"
    }  # fmt: skip
    assert all(row["is_right"] and row["launches"] for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_complete_step_is_right(precision: str) -> None:
    (row,) = run("run_kernels.py", "--backbone", "resnet18", "--precision", precision)
    assert row["is_right"]
    assert row["launches"] > 100


@pytest.mark.slow
def test_a_step_has_no_atomics_no_spills_and_only_aligned_channels() -> None:
    counts = run("codegen.py", "--backbone", "resnet18", "--bs", "16", "--check", "--sm", "90")
    assert counts["atomics"] == counts["unaligned_convolutions"] == 0
    assert counts["launches_forward"] > 50
