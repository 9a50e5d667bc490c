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
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from conftest import TINY_RUN, run_cli
from helpers import fork, wait_for

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.data.shapes import generate
from ssdctl.errors import UsageError
from ssdctl.files import TEMPORARY_SUFFIX
from ssdctl.runs import lock
from ssdctl.runs.layout import RunDir

START_S = 0.02  # all forks are waiting by then
ROUNDS = int(os.environ.get("RACES", "5"))


def run_together(works: list[Callable[[], int]], log: Path) -> list[int]:
    """Call each function in a fork of its own, all at the same time; return what they return.

    Args:
        works: The result of each is its process's exit code.
        log: The folder of their output, one file each.
    """
    log.mkdir(parents=True, exist_ok=True)
    start = time.monotonic() + START_S
    children = []
    for number, work in enumerate(works):
        pid = fork()
        if pid == 0:
            os._exit(_child(work, start, log / f"{number}.log"))
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def import_modules_of(work: Callable[[], int], log: Path) -> int:
    """Run a function in a fork, then import here what it imported; return what it returned.

    Forks that run the same again import nothing, so that they stay close in time. The function
    itself is not run here: its threads would not exist in the forks.
    """
    names = log / "modules"

    def run() -> int:
        code = work()
        names.write_text("\n".join(sys.modules))
        return code

    (code,) = run_together([run], log)
    for name in names.read_text().splitlines():
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(name)
    return code


def _child(work: Callable[[], int], start: float, log: Path) -> int:
    """Wait for the common start and work; never raise, since the fork must not continue a test."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        while time.monotonic() < start:
            pass
        return work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        return 99


def command(*arguments: object) -> int:
    """Run a command in this process, which is a fork; return its exit code."""
    result = run_cli(*arguments)
    os.write(2, result.err.encode(errors="replace"))
    return result.code


def leftovers(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith(TEMPORARY_SUFFIX)]


@pytest.mark.parametrize("rounds", [10, pytest.param(ROUNDS, marks=pytest.mark.slow)])
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
        assert load_checkpoint(run.last).step == 1
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
