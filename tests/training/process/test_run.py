"""Runs: resumed bit-equal, stopped by signals, refused if figures would be wrong, on two ranks."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import TINY_RUN, Cli
from helpers import (
    ForkedProcess,
    assert_same_state,
    is_mountable,
    last,
    records,
    run_script,
    start,
    wait_for,
)

from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.cli.main import main
from ssdctl.data import open_dataset
from ssdctl.input import augmentations, sampler
from ssdctl.input.augmentations import color

if TYPE_CHECKING:
    from training.process.conftest import Train


OPTIONS = TINY_RUN.split()


def test_run_folder_contains_the_documented_files(tiny_run: Path, shapes: Path) -> None:
    for name in ("config.toml", "environment.json", "metrics.jsonl", "logs", "checkpoints/last.pt"):
        assert (tiny_run / name).exists(), name
    train = records(tiny_run, "train")
    assert [r["step"] for r in train] == [1, 2, 3]
    keys = {"kind", "step", "epoch", "loss", "loss_box", "loss_class", "lr", "images_per_second"}
    assert keys | {"grad_norm", "data_wait", "memory_bytes"} == set(train[0])
    assert train[0]["loss"] == pytest.approx(train[0]["loss_box"] + train[0]["loss_class"])
    (evaluation,) = records(tiny_run, "eval")
    assert {"AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs"} < set(
        evaluation
    )
    assert f'root = "{shapes}"' in (tiny_run / "config.toml").read_text()
    config = torch.load(tiny_run / "checkpoints" / "last.pt", weights_only=True)["config"]
    assert {path.partition(".")[0] for path in config} == {"data", "model", "train", "evaluate"}


def test_a_run_names_its_data_its_best_checkpoint_and_what_to_do_next(
    run: Path, train: Train
) -> None:
    words = train("--steps", 4)
    for text in ("ball", "ring", "tiny", "step 3", "fp32", "4 steps"):
        assert text in words
    assert f"{run / 'checkpoints/best.pt'} (AP " in words
    assert f"ssdctl predict {run} " in words
    assert f"ssdctl report {run}" in words
    for quiet in ("-q", "--json"):
        assert "ssdctl report" not in train("--steps", 4, quiet)


def test_a_plan_knows_the_time_of_a_run_that_was_started(
    tiny_run: Path, shapes: Path, cli: Cli
) -> None:
    plan = ["train", "--data", shapes, "--steps", 4, *OPTIONS, "--dry-run"]
    assert "img/s" in cli(*plan, "--out", tiny_run).out
    assert "img/s" not in cli(*plan, "--out", "another").out


def test_resumed_run_is_bit_equal(run: Path, tmp_path: Path, train: Train) -> None:
    """Three steps and then three more, with other threads, or six at once: the same weights."""
    straight = tmp_path / "straight"
    assert "step-00000003.pt" in train("--steps", 6, "--workers", 3)
    train("--steps", 6, out=straight)
    assert_same_state(last(run), last(straight))
    assert [r["step"] for r in records(run, "train")] == [1, 2, 3, 4, 5, 6]
    losses = ([r["loss"] for r in records(folder, "train")] for folder in (run, straight))
    assert next(losses) == next(losses)


def test_finished_run_is_not_trained_again(run: Path, train: Train) -> None:
    before = last(run)
    assert "step 3 of 3" in train("--steps", 3)
    assert_same_state(before, last(run))


def test_each_epoch_has_a_record(tmp_path: Path, train: Train) -> None:
    """Eight images and batches of two: an epoch ends at steps 4 and 8, also across a resume."""
    assert "epoch 1.00" in train("--limit-train", 8, "--steps", 5)
    train("--limit-train", 8, "--steps", 9)
    epochs = records(tmp_path / "run", "epoch")
    assert [(r["step"], r["epoch"]) for r in epochs] == [(4, 1.0), (8, 2.0)]
    assert all(r["duration_s"] > 0 and r["images_per_second"] > 0 for r in epochs)


def test_resuming_with_another_folder_is_reported(
    run: Path, shapes: Path, tmp_path: Path, train: Train
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(shapes)
    words = train("--steps", 3, data=moved).split()
    assert {str(shapes), str(moved)} <= {word.strip(",;:.") for word in words}
    assert "0.0 img/s" not in " ".join(words)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--lr", "0.1"], 2, "train.lr was 0.0025, is 0.1"),
        (["--seed", "5"], 2, "train.seed was 0, is 5"),
        (["--lr", "0.1", "--resume-changed"], 0, "train.lr was 0.0025, is 0.1"),
        (["--keep", "5", "--save-every", "1st"], 0, "step-00000003.pt"),
    ],
)
def test_what_a_resume_refuses(
    run: Path, train: Train, options: list[str], code: int, words: str
) -> None:
    assert words in train("--steps", 4, *options, code=code)


def test_a_checkpoint_of_a_newer_version_is_left_alone(run: Path, train: Train) -> None:
    newest = run / "checkpoints/step-00000003.pt"
    torch.save(torch.load(newest, weights_only=True) | {"format": 2}, newest)
    content, names = newest.read_bytes(), sorted(p.name for p in newest.parent.iterdir())
    assert newest.name in train("--steps", 4, code=2)
    assert newest.read_bytes() == content
    assert sorted(p.name for p in newest.parent.iterdir()) == names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_saves_and_exits_75(
    shapes: Path, tmp_path: Path, train: Train, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = start("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 1000)
    wait_for(lambda: has_steps(run), process)
    process.send_signal(number)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert number.name in words
    assert "Traceback" not in words
    stopped = last(run).step
    assert stopped == records(run, "train")[-1]["step"]
    train("--steps", stopped + 1)
    assert [r["step"] for r in records(run, "train")] == list(range(1, stopped + 2))


def has_steps(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and len(records(run, "train")) > 1


def test_nohup_ignores_a_lost_terminal(shapes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 1000]

    def under_nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        main(list(map(str, options)))

    process = ForkedProcess(under_nohup)
    wait_for(lambda: has_steps(run), process)
    process.send_signal(signal.SIGHUP)
    steps = len(records(run, "train"))
    wait_for(lambda: len(records(run, "train")) > steps + 1, process)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert "SIGTERM" in words


def test_a_run_whose_terminal_closes_is_saved(shapes: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and all output fails from then on."""
    run = tmp_path / "run"
    options = ["train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 1000]
    controlled = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY); "
    controlled += "os.execv(sys.executable, [sys.executable, '-m', 'ssdctl', *sys.argv[1:]])"
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", controlled, *map(str, options)],
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
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


def test_a_second_interrupt_ends_in_mid_step(shapes: Path, tmp_path: Path) -> None:
    """The first one would wait for the step's end, and a step may hang."""
    options = ["train", "--data", shapes, "--out", tmp_path / "run", *OPTIONS, "--steps", 2]
    process = run_script(SLOW_STEP, *options)
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
def test_a_signal_during_the_imports_ends_it_there(
    shapes: Path, tmp_path: Path, module: str
) -> None:
    """Python reports each import at its end: a package's own comes after its modules."""
    options = ["train", "--data", shapes, "--out", tmp_path / "run", *OPTIONS, "--steps", 9]
    command = [sys.executable, "-X", "importtime", "-m", "ssdctl", *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 75, rest[-2000:]
    assert "before the first step" in rest
    assert rest.count("import time:") < 100  # of some thousand
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


@pytest.mark.slow(in_ci=True)
def test_two_ranks_train_and_evaluate_as_one(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """Two gloo ranks through torchrun; nine validation images do not divide by two.

    Containers have little shared memory: none is needed.
    """
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", "--data", str(shapes)]
    # The moving average has the statistics of batch norm of both ranks, too.
    command += ["--out", str(run), "--steps", "2", *OPTIONS, "--bs", "1", "--ema", "0.5"]
    if is_mountable(tmp_path):
        fill = "head -c 64K /dev/zero > /dev/shm/full"
        script = f'mount -t tmpfs -o size=64k none /dev/shm && {fill} && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", script, "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    checkpoint = last(run)
    assert checkpoint.step == 2
    assert checkpoint.samples_seen == 4
    (evaluation,) = records(run, "eval")
    evaluated = cli("evaluate", run / "checkpoints/last.pt", "--json", "--device", "cpu")
    assert evaluated.code == 0, evaluated.err
    figures = json.loads(evaluated.out)
    for name in ("AP", "AP50", "AR100", "ARm"):
        assert figures[name] == pytest.approx(evaluation[name], abs=1e-9)
    assert figures["images"] == 9


@pytest.mark.slow(in_ci=True)
def test_two_ranks_that_are_stopped_between_saves_resume_bit_equal(
    shapes: Path, tmp_path: Path
) -> None:
    """Averaging their statistics of batch norm at the signal would change what follows."""
    command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", "--data", str(shapes)]
    command += [*OPTIONS, "--bs", "1", "--ema", "0.5", "--steps", "100"]
    command += ["--save-every", "1000st", "--eval-every", "1000st", "--out"]
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, text=True)
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "run"
    process = subprocess.Popen([*command, str(run)], stderr=subprocess.PIPE, text=True)
    while not has_steps(run):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert 1 < last(run).step < 100
    again = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert_same_state(last(run), last(tmp_path / "whole"))


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_what_a_bad_step_leads_to(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The colors of the fourth batch are infinite, as of a broken sample."""
    run, calls, saved = tmp_path / "run", itertools.count(), list[tuple[int, int]]()
    write = CheckpointFolder.write

    def draw(*arguments: Any) -> Any:
        result = color.draw(*arguments)
        return result * float("inf") if next(calls) == 3 else result

    def noted(folder: CheckpointFolder, payload: dict[str, Any]) -> None:
        saved.append((payload["step"], payload["samples_seen"]))
        write(folder, payload)

    *others, _ = augmentations.load("ssd")
    broken = (*others, augmentations.Augmentation(4, draw, color.apply))
    monkeypatch.setattr(sampler, "load", lambda _: broken)
    monkeypatch.setattr(CheckpointFolder, "write", noted)
    code = 7 if policy == "stop" else 0
    words = train("--save-every", "2st", "--steps", 6, "--on-nonfinite", policy, code=code)
    named = json.loads((run / "nonfinite/step-00000004.json").read_text())
    assert len(named["image_ids"]) == 2
    assert str(run / "nonfinite") in words
    checkpoint, trained = last(run), records(run, "train")
    assert all(torch.isfinite(t).all() for t in checkpoint.model.values())
    if policy == "stop":
        assert checkpoint.step == 2
        return
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5, 6]
    # A rollback from step 4 to step 2 takes two more batches than a skip does.
    assert checkpoint.samples_seen == (12 if policy == "skip" else 16)
    kinds = [r["event"] for r in records(run, "event")]
    assert ("rolled_back" in kinds) == (policy == "rollback")
    # A run resumed from there must not read the offending images again.
    rolled_back = [(2, 4), (2, 8), (4, 12), (6, 16)]
    assert saved == ([(2, 4), (4, 8), (6, 12)] if policy == "skip" else rolled_back)
    assert (trained[3]["loss"] == -1) == (policy == "skip")


PLAIN_RUN = TINY_RUN.replace("--preset stable-r34 ", "").split()


@pytest.mark.parametrize(
    "options",
    [["--overfit", "2"], ["--limit-train", "7"], ["--overfit", "5", "--limit-train", "3"]],
)
def test_the_dry_run_plans_what_is_trained(cli: Cli, shapes: Path, options: list[str]) -> None:
    command = ["train", "--data", shapes, "--out", "run", *PLAIN_RUN, "--steps", 1, *options]
    plan = json.loads(cli(*command, "--dry-run", "--json").out)
    assert not Path("run").exists()
    assert cli(*command).code == 0
    started = records(Path("run"), "event")[0]
    assert plan["images"] == started["train_images"]
    assert plan["global_batch_size"] == started["global_batch_size"]


def test_the_dry_run_plans_the_network_of_init(cli: Cli, shapes: Path, checkpoint: Path) -> None:
    def size(*options: object) -> str:
        result = cli("train", "--data", shapes, "--dry-run", *options)
        assert result.code == 0, result.err
        (line,) = [line for line in result.out.splitlines() if line.startswith("checkpoints")]
        return line.split()[1]

    tiny = ["--backbone", "tiny", "--backbone-weights", "none"]
    assert size("--init", checkpoint) == size(*tiny) != size()
