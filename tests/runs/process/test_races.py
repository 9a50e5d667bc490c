"""Two processes that start in the same millisecond: one goes on, the other exits 2 or waits.

RACES=200 scripts/test -m slow tests/runs/process/test_races.py     # 200 races
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import Result
from helpers import ForkedProcess, wait_for

from ssdctl.errors import UsageError
from ssdctl.runs import folder as run_folder

START_S = 0.02  # both forks are waiting by then
ROUNDS = int(os.environ.get("RACES", "5"))


def run_twice(work: Callable[[], object]) -> list[Result]:
    start = time.monotonic() + START_S

    def wait_and_work() -> None:
        while time.monotonic() < start:
            pass
        work()

    forks = [ForkedProcess(wait_and_work) for _ in range(2)]
    outputs = [fork.communicate() for fork in forks]
    return [Result(fork.wait(1), *output) for fork, output in zip(forks, outputs, strict=True)]


@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.slow)])
def test_a_lock_has_one_owner(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner keeps it until the other one has given up."""
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)  # time in which the owner writes its name
    monkeypatch.setattr(run_folder, "POLL_S", 0.0)
    refused = tmp_path / "refused"

    def train(out: Path) -> None:
        try:
            with run_folder.exclusive_run(out):
                (out / str(os.getpid())).touch()
                wait_for(refused.exists)
        except UsageError as error:
            refused.touch()
            raise SystemExit(error.exit_code) from None

    for number in range(rounds):
        out = tmp_path / str(number)
        ended = run_twice(partial(train, out))
        assert sorted(e.code for e in ended) == [0, 2], ended
        assert len(list(out.iterdir())) == 1, number
        refused.unlink()
