"""What the tests of runs share: training in this process."""

from pathlib import Path

import pytest
from conftest import TINY_RUN, run_cli
from helpers import Train


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
