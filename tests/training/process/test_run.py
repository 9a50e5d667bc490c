"""Runs: resumed bit-equal, stopped by signals, refused if figures would be wrong, on two ranks."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RUN, Result
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

Cli = Callable[..., Result]


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
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    options = ["train", "--data", shapes, "--out", run, "--steps", 4, *OPTIONS]
    result = cli(*options)
    assert result.code == 0, result.err
    for text in ("ball", "ring", "tiny", "continues from step 3", "fp32", "4 steps"):
        assert text in result.err
    assert f"{run / 'checkpoints/best.pt'} (AP " in result.err
    assert f"ssdctl predict {run} " in result.err
    assert f"ssdctl report {run}" in result.err
    for quiet in ("-q", "--json"):
        assert "ssdctl report" not in cli(*options, quiet).err


def test_a_plan_knows_the_time_of_a_run_that_was_started(
    tiny_run: Path, shapes: Path, cli: Cli
) -> None:
    plan = ["train", "--data", shapes, "--steps", 4, *OPTIONS, "--dry-run"]
    assert "img/s" in cli(*plan, "--out", tiny_run).out
    assert "img/s" not in cli(*plan, "--out", "another").out


def test_resumed_run_is_bit_equal(tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """Three steps and then three more, with other threads, or six at once: the same weights."""
    resumed, straight = tmp_path / "resumed", tmp_path / "straight"
    shutil.copytree(tiny_run, resumed)
    more = ["train", "--data", shapes, "--steps", 6, *OPTIONS]
    again = cli(*more, "--out", resumed, "--workers", 3)
    assert again.code == 0, again.err
    assert "resuming from" in again.err
    assert cli(*more, "--out", straight).code == 0
    assert_same_state(last(resumed), last(straight))
    assert [r["step"] for r in records(resumed, "train")] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in records(resumed, "train")] == [
        r["loss"] for r in records(straight, "train")
    ]


def test_finished_run_is_not_trained_again(
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    before = last(run)
    result = cli("train", "--data", shapes, "--out", run, "--steps", 3, *OPTIONS, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["step"] == 3
    assert "step 3 of 3: nothing left to train" in result.err
    assert_same_state(before, last(run))


def test_each_epoch_has_a_record(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """Eight images and batches of two: an epoch ends at steps 4 and 8, also across a resume."""
    run = tmp_path / "run"
    options = ["train", "--data", shapes, "--out", run, *OPTIONS, "--limit-train", 8]
    first = cli(*options, "--steps", 5)
    assert first.code == 0, first.err
    assert "epoch 1.00" in first.err
    assert cli(*options, "--steps", 9).code == 0
    epochs = records(run, "epoch")
    assert [(r["step"], r["epoch"]) for r in epochs] == [(4, 1.0), (8, 2.0)]
    assert all(r["duration_s"] > 0 and r["images_per_second"] > 0 for r in epochs)


def test_resuming_with_another_folder_is_reported(
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(tiny_run, run)
    moved.symlink_to(shapes)
    result = cli("train", "--data", moved, "--out", run, "--steps", 3, *OPTIONS)
    assert result.code == 0, result.err
    assert {str(shapes), str(moved)} <= {w.strip(",;:.") for w in result.err.split()}
    assert " 0.0 img/s" not in result.out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--lr", "0.1"], 2, "train.lr was 0.0025, is 0.1"),
        (["--seed", "5"], 2, "train.seed was 0, is 5"),
        (["--lr", "0.1", "--resume-changed"], 0, "train.lr was 0.0025, is 0.1"),
        (["--keep", "5", "--save-every", "1st"], 0, "resuming"),
    ],
)
def test_what_a_resume_refuses(
    tiny_run: Path,
    shapes: Path,
    tmp_path: Path,
    cli: Cli,
    options: list[str],
    code: int,
    words: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    result = cli("train", "--data", shapes, "--out", run, "--steps", 4, *OPTIONS, *options)
    assert result.code == code, result.err
    assert words in result.err


def test_a_checkpoint_of_a_newer_version_is_left_alone(
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    newest = run / "checkpoints/step-00000003.pt"
    payload = torch.load(newest, weights_only=True) | {"format": 2}
    torch.save(payload, newest)
    content, names = newest.read_bytes(), sorted(p.name for p in newest.parent.iterdir())
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 4)
    assert result.code == 2, result.err
    assert newest.name in result.err
    assert newest.read_bytes() == content
    assert sorted(p.name for p in newest.parent.iterdir()) == names


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_saves_and_exits_75(
    shapes: Path, tmp_path: Path, cli: Cli, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    options = ["train", "--data", shapes, "--out", run, *OPTIONS]
    process = start(*options, "--steps", 1000)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(records(run, "train")) > 1, process)
    process.send_signal(number)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert number.name in words
    assert "run the same command again" in words
    assert "Traceback" not in words
    stopped = last(run).step
    assert stopped == records(run, "train")[-1]["step"]
    result = cli(*options, "--steps", stopped + 1)
    assert result.code == 0, result.err
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
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large dataset takes minutes, and nothing needs to be saved yet."""
    went_on: list[bool] = []

    def interrupted(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        went_on.append(True)

    monkeypatch.setattr(open_dataset, "open_dataset", interrupted)
    result = cli("train", "--data", "data", "--out", tmp_path / "run", *OPTIONS, "--steps", 1)
    assert result.code == 75, result.err
    assert "before the first step" in result.err
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
    while not ((run / "metrics.jsonl").exists() and len(records(run, "train")) > 1):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=120)
    assert process.returncode == 75, words
    assert 1 < last(run).step < 100
    again = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert_same_state(last(run), last(tmp_path / "whole"))


def broken_step(shapes: Path, monkeypatch: pytest.MonkeyPatch, bad_calls: set[int]) -> None:
    """Make the colors of some batches infinite, as a broken sample would."""
    from ssdctl.input import augmentations, sampler
    from ssdctl.input.augmentations import color

    calls = iter(range(10_000))

    def draw(*arguments: Any) -> Any:
        result = color.draw(*arguments)
        return result * float("inf") if next(calls) in bad_calls else result

    *others, _ = augmentations.load("ssd")
    broken = (*others, augmentations.Augmentation(4, draw, color.apply))
    monkeypatch.setattr(sampler, "load", lambda _: broken)


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_what_a_bad_step_leads_to(
    shapes: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    run = tmp_path / "run"
    broken_step(shapes, monkeypatch, {3})  # the fourth batch
    saved: list[tuple[int, int]] = []
    write = CheckpointFolder.write

    def noted(folder: CheckpointFolder, payload: dict[str, Any]) -> None:
        saved.append((payload["step"], payload["samples_seen"]))
        write(folder, payload)

    monkeypatch.setattr(CheckpointFolder, "write", noted)
    options = ["train", "--data", shapes, "--out", run, *OPTIONS, "--save-every", "2st"]
    result = cli(*options, "--steps", 6, "--on-nonfinite", policy)
    named = json.loads((run / "nonfinite/step-00000004.json").read_text())
    assert len(named["image_ids"]) == 2
    assert result.code == (7 if policy == "stop" else 0), result.err
    assert "Traceback" not in result.err
    assert str(run / "nonfinite") in result.err
    steps = [r["step"] for r in records(run, "train")]
    checkpoint = last(run)
    assert all(torch.isfinite(t).all() for t in checkpoint.model.values())
    if policy == "stop":
        assert checkpoint.step == 2
        return
    assert steps == [1, 2, 3, 4, 5, 6]
    # A rollback from step 4 to step 2 takes two more batches than a skip does.
    assert checkpoint.samples_seen == (12 if policy == "skip" else 16)
    kinds = [r["event"] for r in records(run, "event")]
    assert ("rolled_back" in kinds) == (policy == "rollback")
    # A run resumed from there must not read the offending images again.
    assert saved[1] == ((4, 8) if policy == "skip" else (2, 8))
    assert all(
        r["loss"] == -1 for r in records(run, "train") if r["step"] == 4 and policy == "skip"
    )


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
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    started = records[0]
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
