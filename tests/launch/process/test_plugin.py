"""A launcher of another package: `--help`, the config and `launch` find its module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import install_package

PLUGIN = """
import sys
from typing import Annotated
from ssdctl.config.fields import Section, setting
from ssdctl.launch import LaunchPlan

class Settings(Section, frozen=True):
    word: Annotated[str, setting("A word")] = "plain"

def require(): print("required")

def plan(request, node):
    program = "import os, sys; print(*sys.argv[1:]); sys.exit(int(os.environ['CODE']))"
    argv = (sys.executable, "-c", program, request.table.word, *request.command)
    return LaunchPlan(argv, {"CODE": "3"}, request.launcher, request.count)
"""


def test_a_launcher_of_another_package(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        entries = "[ssdctl.launchers]\nmine = my_launcher\n"
        install_package(tmp_path, patch, "my_launcher", PLUGIN, entries)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    def ssdctl(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ssdctl", *words]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, cwd=tmp_path)

    assert "mine" in ssdctl("launch", "--help").stdout
    assert "A word" in ssdctl("config", "schema").stdout
    done = ssdctl("launch", "--cpus", "2", "--launcher", "mine", "--set", "mine.word=a b", "--bs=2")
    assert done.stdout.splitlines() == ["required", "a b train --bs=2 --device=cpu"]
    assert done.returncode == 3
