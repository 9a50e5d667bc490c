"""What a training process imports: packages that take seconds of CPU time stay out of eager runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SLOW_TO_IMPORT = ("torchvision", "torch._dynamo", "torch._inductor", "sympy")


def imported_by(code: str, *arguments: str) -> set[str]:
    """Return the modules that are loaded after the code has run in a new interpreter."""
    code += "\nimport json, sys\nprint('\\n' + json.dumps(list(sys.modules)))"
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return set(json.loads(process.stdout.splitlines()[-1]))


def test_training_and_saving_a_step(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from ssdctl.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as exit:\n"
        "    assert not exit.code, exit.code\n"
    )
    options = "--fake-data --steps 2 --warmup 1st --bs 1 --backbone tiny --backbone-weights none"
    arguments = ["train", *options.split(), "--device", "cpu", "--out", str(tmp_path / "run")]
    loaded = imported_by(code, *arguments)
    assert "torch" in loaded
    assert (tmp_path / "run/checkpoints/last.pt").exists()
    assert not loaded & set(SLOW_TO_IMPORT)
