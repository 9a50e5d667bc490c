"""Two processes that start in the same millisecond: one goes on, the other exits 2 or waits.

RACES=200 scripts/test -m slow tests/runs/test_races.py     # 200 races of each kind
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY_RUN, run_cli
from forked import import_modules_of, run_together
from processes import wait_for

from ssdctl.checkpoint.reader import read_checkpoint
from ssdctl.data.shapes import generate
from ssdctl.errors import UsageError
from ssdctl.files import TEMPORARY_SUFFIX
from ssdctl.runs import lock
from ssdctl.runs.layout import RunDir

ROUNDS = int(os.environ.get("RACES", "5"))


def command(*arguments: object) -> int:
    """Run a command in this process, which is a fork; return its exit code."""
    result = run_cli(*arguments)
    os.write(2, result.err.encode(errors="replace"))
    return result.code


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith(TEMPORARY_SUFFIX)]


@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.slow)])
@pytest.mark.process
def test_the_lock_has_one_owner(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner keeps it until the other one has given up."""
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    monkeypatch.setattr(lock, "POLL_S", 0.0)

    refused = tmp_path / "refused"

    def train(out: Path) -> int:
        try:
            with lock.exclusive_run(out):
                (out / str(os.getpid())).touch()
                wait_for(refused.exists)
        except UsageError as error:
            refused.touch()
            return error.exit_code
        return 0

    for number in range(rounds):
        out = tmp_path / str(number)
        codes = run_together([partial(train, out)] * 2, tmp_path / "log")
        assert sorted(codes) == [0, 2], (number, codes)
        assert len(list(out.iterdir())) == 1, number
        refused.unlink()


@pytest.mark.slow
def test_two_trainings_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "WAIT_S", 0.0)
    generate(tmp_path / "data", num_train=2, num_val=1)  # the evaluation is most of the time
    train = ["train", "--data", tmp_path / "data", "--steps", 1, *TINY_RUN.split()]
    first = partial(command, *train, "--out", tmp_path / "first")  # it also prepares the dataset
    assert import_modules_of(first, tmp_path) == 0
    for number in range(ROUNDS):
        out = tmp_path / str(number)
        codes = run_together([partial(command, *train, "--out", out)] * 2, tmp_path / "log")
        logs = [(tmp_path / f"log/{i}.log").read_text() for i in range(2)]
        assert sorted(codes) in ([0, 2], [0, 0]), (number, codes, logs)
        # On a busy machine the second one may ask for the lock after the first one's end.
        refused = [log for code, log in zip(codes, logs, strict=True) if code == 2]
        late = [log for log in logs if "nothing left to train" in log]
        assert len(refused) + len(late) == 1, (number, codes, logs)
        assert all("another ssdctl process" in log for log in refused)
        run = RunDir(out)
        assert read_checkpoint(run.last).step == 1
        steps = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        assert [r["step"] for r in steps if r["kind"] == "train"] == [1], number
        assert not leftovers(out)
        assert not run.lock.exists()


@pytest.mark.slow
def test_two_prepares_at_once(shapes: Path, tmp_path: Path) -> None:
    """The second one waits, and finds everything done."""

    def prepare(store: Path) -> Callable[[], int]:
        return partial(command, "prepare", "--data", shapes, "--store", store, "--jobs", 1)

    assert import_modules_of(prepare(tmp_path / "one"), tmp_path) == 0
    expected = json.loads((tmp_path / "one/report.json").read_text())
    for number in range(ROUNDS):
        store = tmp_path / str(number)
        codes = run_together([prepare(store)] * 2, tmp_path / "log")
        assert codes == [0, 0], (number, [p.read_text() for p in (tmp_path / "log").iterdir()])
        report = json.loads((store / "report.json").read_text())
        assert report == {**expected, "store": str(store)}, number
        names = {p.name for p in store.iterdir()}
        assert names == {p.name for p in (tmp_path / "one").iterdir()}, number
        assert not leftovers(store)
