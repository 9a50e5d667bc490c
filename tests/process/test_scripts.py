"""The set-up scripts: what a newcomer sees if something is missing on the machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = "bash cat cksum cut df dirname env getconf grep head kill mktemp printf rm sed sleep tail"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that the scripts read, in a path with a blank."""
    folder = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "ssdctl").mkdir()
    shutil.copy(ROOT / "ssdctl" / "_version.py", folder / "ssdctl")
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder for PATH with the programs that the scripts use, without any Python or uv."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS.split():
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def add_python(tools: Path, *before: str) -> None:
    """Add a `python3` that runs this Python after the shell commands."""
    base = getattr(sys, "_base_executable", sys.executable)
    (tools / "python3").write_text("\n".join(["#!/bin/sh", *before, f'exec "{base}" "$@"', ""]))
    (tools / "python3").chmod(0o755)


def run(clone: Path, tools: Path, **variables: str) -> tuple[int, list[str]]:
    """Run scripts/demo from another folder; return its exit code and the lines of stderr."""
    home = clone.parent / "home"
    home.mkdir()
    done = subprocess.run(
        [str(clone / "scripts" / "demo")],
        cwd=home,
        env={"HOME": str(home), "PATH": str(tools), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("python", "named"),
    [
        (None, ["3.10 to 3.14", "PYTHON"]),
        (['[ "$1" = --version ] && echo Python 3.9.18', "exit 1"], ["Python 3.9.18"]),
        (['export PYTHONPATH="HIDDEN"'], ["python3-venv"]),
    ],
    ids=["none", "too old", "without venv"],
)
def test_an_unsuitable_python(
    clone: Path, tools: Path, tmp_path: Path, python: list[str] | None, named: list[str]
) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "ensurepip.py").write_text("raise ImportError")
    if python is not None:
        add_python(tools, *(line.replace("HIDDEN", str(tmp_path / "hidden")) for line in python))
    code, lines = run(clone, tools)
    assert (code, len(lines)) == (2, 1)
    assert all(word in lines[0] for word in named)


def test_no_network(clone: Path, tools: Path) -> None:
    add_python(tools)
    index = {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    code, lines = run(clone, tools, PIP_RETRIES="0", **index)
    assert (code, len(lines)) == (2, 2)
    assert lines[0].startswith("Installing")
    assert "PIP_INDEX_URL" in lines[1]
