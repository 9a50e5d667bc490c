"""Broken shared libraries of the packages that every command imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "command",
    [["train", "--fake-data", "--steps", "1"], ["evaluate", "x.json"], ["doctor", "--json"]],
)
def test_a_wrong_library_path_is_named(tmp_path: Path, command: list[str]) -> None:
    library = tmp_path / "lib/libstdc++.so.6"
    library.parent.mkdir()
    library.touch()
    done = subprocess.run(
        [sys.executable, "-m", "ssdctl", *command],
        env=os.environ | {"LD_LIBRARY_PATH": str(library.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    words = done.stderr
    if command[0] == "doctor":  # the other checks are made
        checks = {check["name"]: check for check in json.loads(done.stdout)}
        assert checks["memory"]["state"] == "ok"
        assert checks["torch import"]["state"] == "fail"
        words = checks["data"]["detail"] + checks["data"]["remedy"]
    assert str(library) in words
    assert "LD_LIBRARY_PATH" in words
