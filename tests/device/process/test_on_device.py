"""benchmarks/on_gpu.sh and on_hpu.sh, on a machine without the accelerator."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("on_device", BENCHMARKS / "on_device.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "on_device", script)
    spec.loader.exec_module(script)
    command = [sys.executable, "-c"]
    parts = {
        "fails": (1, lambda bench: bench.run(*command, "raise SystemExit('broken')")),
        "hangs": (0.01, lambda bench: bench.run(*command, "import time; time.sleep(60)")),
        "needs a GPU": (1, lambda bench: bench.needs_accelerator()),
        "works": (1, lambda bench: "42 img/s"),
    }
    monkeypatch.setattr(script, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["on_device.py", "cuda", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1
    (file,) = tmp_path.glob("RESULTS-*.md")
    lines = file.read_text().splitlines()
    states = [row.split("|")[2].strip() for row in lines if row.startswith("| ")][1:]
    assert states == ["FAILED", "FAILED", "skipped", "ok"]
    assert {"broken", "42 img/s"} <= {*lines}


IN_CI = pytest.mark.slow(in_ci=True)


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
