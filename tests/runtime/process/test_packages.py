"""Broken shared libraries of the packages that every command imports, and too little memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("gigabytes", [1.0, 2.5])
def test_a_limit_of_virtual_memory_is_named(tmp_path: Path, gigabytes: float) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 1e9),) * 2)

    (tmp_path / "x.pt").write_bytes(b"x")
    command = [sys.executable, "-m", "ssdctl", "export", "x.pt", "--format", "mlperf"]
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--out", "y.pt"], preexec_fn=limit, check=False, **options)
    if done.returncode != 5:  # a build of torch that needs less: the file is no checkpoint
        assert done.returncode == 2, done.stderr
        assert "virtual memory" in done.stderr


@pytest.mark.parametrize(
    "command",
    [["train", "--fake-data", "--steps", "1"], ["evaluate", "x.json"], ["doctor", "--json"]],
)
def test_a_wrong_library_path_is_named(tmp_path: Path, command: list[str]) -> None:
    library = tmp_path / "lib/libstdc++.so.6"
    library.parent.mkdir()
    library.touch()
    (tmp_path / "x.json").write_text("[]")
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
