"""Two processes that start in the same millisecond: one goes on, the other exits 2 or waits.

RACES=200 scripts/test -m slow tests/runs/process/test_races.py     # 200 races of each kind
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Result
from helpers import ForkedProcess, wait_for

from ssdctl.cli.main import main
from ssdctl.errors import UsageError
from ssdctl.files import TEMPORARY_SUFFIX
from ssdctl.runs import folder as run_folder

START_S = 0.02  # both forks are waiting by then
ROUNDS = int(os.environ.get("RACES", "5"))


def run_twice(work: Callable[[], object]) -> list[Result]:
    """Call a function in two forks at the same time."""
    start = time.monotonic() + START_S

    def wait_and_work() -> None:
        while time.monotonic() < start:
            pass
        work()

    forks = [ForkedProcess(wait_and_work) for _ in range(2)]
    outputs = [fork.communicate() for fork in forks]
    return [Result(fork.wait(1), *output) for fork, output in zip(forks, outputs, strict=True)]


def command(*arguments: object) -> Callable[[], None]:
    return partial(main, [str(a) for a in arguments])


def import_modules_of(work: Callable[[], None]) -> None:
    """Run a command in a fork, then import here what it imported.

    Forks that run the same again import nothing, so that they stay close in time. The command is
    not run here: its threads would not exist in the forks.
    """

    def run() -> None:
        with contextlib.suppress(SystemExit):
            work()
        sys.stdout.write(" ".join(["modules", *sys.modules]))

    output, _ = ForkedProcess(run).communicate()
    for name in output.rpartition("modules")[2].split():
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(name)


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith(TEMPORARY_SUFFIX)]


@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.slow)])
def test_the_lock_has_one_owner(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.slow
def test_two_prepares_at_once(shapes: Path, tmp_path: Path) -> None:
    """The second one waits, and finds everything done."""

    def prepare(store: Path) -> Callable[[], None]:
        return command("prepare", "--data", shapes, "--store", store, "--jobs", 1)

    def report(store: Path) -> dict[str, Any]:
        content = json.loads((store / "report.json").read_text())
        for split in content["splits"]:
            del split["key"]  # differs each time
        return content

    import_modules_of(prepare(tmp_path / "one"))
    expected = report(tmp_path / "one")
    for number in range(ROUNDS):
        store = tmp_path / str(number)
        ended = run_twice(prepare(store))
        assert [e.code for e in ended] == [0, 0], ended
        assert report(store) == {**expected, "store": str(store)}, number
        names = {p.name for p in store.iterdir()}
        assert names == {p.name for p in (tmp_path / "one").iterdir()}, number
        assert not leftovers(store)
