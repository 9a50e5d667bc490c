"""Signals that stop a run: it is saved, exits with 75 and continues bit-equal."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from data.formats import exports
from helpers import (
    ForkedProcess,
    Train,
    assert_same_state,
    has_steps,
    last,
    records,
    run_script,
    train_command,
    wait_for,
)

import ssdctl
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.cli.main import main
from ssdctl.data import open_dataset
from ssdctl.errors import DiskError, Stopped
from ssdctl.inference.detector import Detector
from ssdctl.training import evaluator
from ssdctl.training.observers import Detected, Observer, Scored
from ssdctl.training.step import TrainStep


@pytest.fixture
def command(shapes: Path, tmp_path: Path) -> list[str]:
    return list(map(str, train_command(shapes, tmp_path / "run", "--steps", 1000)))


def test_nohup_ignores_a_lost_terminal(command: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"

    def under_nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        main(command)

    process = ForkedProcess(under_nohup)
    wait_for(lambda: has_steps(run), process)
    process.send_signal(signal.SIGHUP)
    steps = len(records(run, "train"))
    wait_for(lambda: has_steps(run, steps + 1), process)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert "SIGTERM" in words


def test_a_run_whose_terminal_closes_is_saved(command: list[str], tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and all output fails from then on."""
    run = tmp_path / "run"
    controlled = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY); "
    controlled += "os.execv(sys.executable, [sys.executable, '-m', 'ssdctl', *sys.argv[1:]])"
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", controlled, *command], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    while not has_steps(run):
        assert process.poll() is None
        if select.select([ours], [], [], 0.05)[0]:
            os.read(ours, 4096)
    os.close(ours)
    assert process.wait(60) == 75
    assert last(run).step == records(run, "train")[-1]["step"]


SLOW_STEP = """
import sys, time
from ssdctl.cli.main import main
from ssdctl.training.step import TrainStep

def slow(*given):
    print("stepping", flush=True)
    time.sleep(60)

TrainStep.__call__ = slow
main(sys.argv[1:])
"""


def test_a_second_interrupt_ends_in_mid_step(command: list[str]) -> None:
    """The first one would wait for the step's end, and a step may hang."""
    process = run_script(SLOW_STEP, *command)
    wait_for(lambda: "stepping" in process.output(), process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=30)
    assert process.returncode == 130, words
    assert "interrupted" in words
    assert "Traceback" not in words


@pytest.mark.slow(in_ci=True)
@pytest.mark.parametrize("module", ["torch.version", "typer"])
def test_a_signal_in_the_imports_ends_it(command: list[str], tmp_path: Path, module: str) -> None:
    """Python reports each import at its end: a package's own comes after its modules."""
    reporting = [sys.executable, "-X", "importtime", "-m", "ssdctl", *command]
    process = subprocess.Popen(reporting, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 75, rest[-2000:]
    assert rest.splitlines()[-2].startswith("stopped by SIGTERM before the first step")  # no error
    assert rest.count("import time:") < 100  # there are some thousand
    assert not (tmp_path / "run").exists()


def test_a_signal_while_it_prepares_ends_it_there(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large dataset takes minutes, and nothing needs to be saved yet."""
    went_on: list[bool] = []

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        went_on.append(True)

    monkeypatch.setattr(open_dataset, "open_dataset", interrupted)
    train("--steps", 1, data=Path("data"), code=75)
    assert not went_on
    assert not (tmp_path / "run").exists()


def test_an_evaluation_that_a_signal_cut_short_is_made_by_the_next_start(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect, options = evaluator.detect, ["--steps", 4, "--eval-every", "2st"]

    def interrupted(*given: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)  # as Slurm and mpirun do
        return detect(*given, **options)

    def looks_on(*_: Any, **__: Any) -> Any:
        raise AssertionError("the other images are left out")

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "detect", interrupted)
        patch.setattr(Detector, "forward", looks_on)
        train(*options, code=75)
    assert last(tmp_path / "run").step == 2  # not a step further
    train(*options)
    assert [r["step"] for r in records(tmp_path / "run", "eval")] == [2, 4]


def test_a_run_stopped_in_its_last_evaluation_ends_as_finished(
    tmp_path: Path, shapes: Path
) -> None:
    class Stop(Observer):
        def on_detections(self, detected: Detected) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    log = tmp_path / "log"
    config = ssdctl.configure(train={"mllog": str(log)})
    settings: dict[str, Any] = {**TINY, "steps": 2, "out": tmp_path / "run", "config": config}
    with pytest.raises(Stopped):
        ssdctl.train(shapes, observers=[Stop()], **settings)
    for _ in range(2):
        ssdctl.train(shapes, **settings)
    ends = [r["event"] for r in records(tmp_path / "run", "event")]
    assert [end for end in ends if end in ("stopped", "finished")] == ["stopped", "finished"]
    assert [line.count("success") for line in log.read_text().splitlines()][-1] == 1


def test_an_observer_may_end_a_run_at_its_best(tmp_path: Path, shapes: Path) -> None:
    class End(Observer):
        def on_evaluation(self, scored: Scored) -> None:
            raise KeyError(scored.step)

    with pytest.raises(KeyError):
        ssdctl.train(shapes, observers=[End()], out=tmp_path / "run", steps=2, **TINY)
    run = ssdctl.Run(tmp_path / "run")
    assert (run.best.name, run.evaluation and run.evaluation.about.step) == ("best.pt", 2)


def test_a_run_scores_the_annotations_that_it_opened(tmp_path: Path, dataset: Path) -> None:
    config = ssdctl.configure(train={"eval_every": "1st"})
    with ssdctl.Trainer(dataset, out=tmp_path / "r", steps=2, config=config, **TINY) as trainer:
        for _ in trainer:
            with exports.edited(dataset / "annotations/instances_val2017.json") as document:
                document["annotations"] = []
            ssdctl.prepare(dataset, pack=False)
    assert min(record["AP"] for record in records(tmp_path / "r", "eval")) >= 0


def test_no_failed_save_is_announced(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrainStep.__call__

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(*given)

    def full(*_: object) -> None:
        raise DiskError("no space left")

    monkeypatch.setattr(TrainStep, "__call__", interrupted)
    monkeypatch.setattr(CheckpointFolder, "write", full)
    words = train("--steps", 3, code=6)
    assert "no space left" in words
    assert "saved" not in words


@pytest.mark.slow(in_ci=True)
def test_two_ranks_stopped_between_saves_resume_bit_equal(shapes: Path, tmp_path: Path) -> None:
    """Averaging their statistics of batch norm at the signal would change what follows."""

    def launch(run: Path) -> subprocess.Popen[str]:
        options = ["--bs", 1, "--ema", 0.5, "--steps", 100]
        options += ["--save-every", "1000st", "--eval-every", "1000st"]
        _, *options = train_command(shapes, run, *options)
        command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", *map(str, options)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder, code in ((whole, 0), (run, 75), (run, 0)):
        process = launch(folder)
        if code == 75:
            while not has_steps(run):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
        _, words = process.communicate(timeout=300)
        assert process.returncode == code, words
        assert 1 < last(folder).step < 100 or code == 0
    assert_same_state(last(run), last(whole))
