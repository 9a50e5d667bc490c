"""What the tests of runs share: a copy of the tiny run, and training in this process."""

import shutil
from pathlib import Path
from typing import Protocol

import pytest
from conftest import TINY_RUN, run_cli


class Train(Protocol):
    def __call__(
        self, *options: object, out: Path | None = None, data: Path | None = None, code: int = 0
    ) -> str: ...


@pytest.fixture
def train(shapes: Path, tmp_path: Path) -> Train:
    """Return a function that trains the tiny network in `tmp_path / "run"`.

    It checks the exit code and returns the error text as one line.
    """

    def run_train(
        *options: object, out: Path | None = None, data: Path | None = None, code: int = 0
    ) -> str:
        command = ["train", "--data", data or shapes, "--out", out or tmp_path / "run"]
        result = run_cli(*command, *TINY_RUN.split(), *options).expect(code)
        return " ".join(result.err.split())

    return run_train


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny run (three steps of two images), where `train` resumes it."""
    return shutil.copytree(tiny_run, tmp_path / "run")
