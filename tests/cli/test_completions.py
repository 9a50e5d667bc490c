"""The completion scripts are those that the program gives, and they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {"ssdctl.bash": "bash", "_ssdctl": "zsh", "ssdctl.fish": "fish"}


@pytest.mark.parametrize(("name", "shell"), FILES.items())
def test_scripts_are_not_stale(name: str, shell: str) -> None:
    environment = {**os.environ, "_SSDCTL_COMPLETE": f"source_{shell}"}
    code = "import sys; sys.argv[0] = 'ssdctl'; from ssdctl.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert (ROOT / "completions" / name).read_text() == done.stdout.strip() + "\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ssdctl ev", {"evaluate"}),
        ("ssdctl train --preset mlp", {"mlperf-r34"}),
        ("ssdctl train --backbone resnet1", {"resnet18", "resnet101", "resnet152"}),
        ("ssdctl train --warm", {"--warmup"}),
        ("ssdctl export x --format s", {"safetensors"}),
    ],
)
def test_words_complete(words: str, expected: set[str]) -> None:
    environment = {
        **os.environ,
        "_SSDCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "import sys; sys.argv[0] = 'ssdctl'; from ssdctl.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert set(done.stdout.split()) == expected


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_script_loads() -> None:
    script = ROOT / "completions" / "ssdctl.bash"
    done = subprocess.run(
        ["bash", "-euc", f"source {script}; complete -p ssdctl"], capture_output=True
    )
    assert done.returncode == 0, done.stderr
