"""Options of the loop: when it evaluates and ends, averaging, and its messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import Cli
from helpers import assert_same_state, last, records

from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.training import setup

if TYPE_CHECKING:
    from training.process.conftest import Train


@pytest.mark.slow(in_ci=True)
def test_evaluates_at_the_given_epochs_and_ends_without_gain(tmp_path: Path, train: Train) -> None:
    """A network that learns nothing (a rate near 0) has the same AP again and again."""
    run = tmp_path / "run"
    # 20 images in batches of 2: an epoch is 10 steps.
    options = ["--steps", 30, "--lr", 1e-9, "--patience", 3, "--limit-train", 20]
    options += ["--eval-at", "0.1,0.2", "--eval-every", "3st"]
    assert "--patience" in train(*options)
    steps = [r["step"] for r in records(run, "eval")]
    assert steps[:4] == [1, 2, 3, 6]  # the one of step 6 is the third without a gain
    stopped = last(run).step
    assert stopped < 30  # a score is recorded some steps after its detections
    train(*options)  # the next start counts the evaluations of this one
    assert last(run).step == stopped


def test_overfits_few_images_and_scores_on_them(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    train("--overfit", 3, "--steps", 3)
    about = json.loads((run / "evaluation.json").read_text())["about"]
    assert (about["images"], about["split"]) == (3, "train")
    assert last(run).images == 3


@pytest.mark.slow(in_ci=True)
def test_average_of_the_weights(tmp_path: Path, train: Train) -> None:
    """It is evaluated; training continues from the weights themselves, resumed or not."""
    plain, averaged, straight = (tmp_path / name for name in ("plain", "averaged", "straight"))
    train("--lr", "1e-2", "--steps", 4, out=plain)
    for steps in (2, 4):
        train("--lr", "1e-2", "--steps", steps, "--ema", 0.5, out=averaged)
    actual, expected = last(averaged), last(plain)
    assert actual.trained is not None
    assert_same_state(actual._replace(model=actual.trained), expected)
    name = "box_heads.0.weight"
    assert not torch.equal(actual.model[name], actual.trained[name])
    train("--lr", "1e-2", "--steps", 4, "--ema", 0.5, out=straight)
    assert_same_state(actual, last(straight))


def test_the_checkpoint_of_init_is_read_once(
    shapes: Path, cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a preset: for the network and for its weights."""
    read: list[Path] = []

    def counted(path: Path) -> Checkpoint:
        read.append(path)
        return load_checkpoint(path)

    monkeypatch.setattr(setup, "load_checkpoint", counted)
    command = ["train", "--data", shapes, "--out", "run", "--init", checkpoint, "--steps", 1]
    result = cli(*command, "--workers", 1, "--device", "cpu", "--warmup", "1st")
    assert result.code == 0, result.err
    assert read == [checkpoint]


def test_writes_tensorboard_and_mlperfs_log(tmp_path: Path, train: Train) -> None:
    pytest.importorskip("tensorboard", reason="the extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, log = tmp_path / "run", tmp_path / "mlperf.log"
    try:
        train("--steps", 2, "--tensorboard", "--mllog", log, "--deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2]
    assert events.Scalars("eval/AP")[0].value == pytest.approx(records(run, "eval")[0]["AP"])
    assert len(events.Tags()["images"]) == 4
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    keys = [line["key"] for line in lines]
    assert keys[-3:] == ["eval_accuracy", "eval_stop", "run_stop"]
    assert lines[-1]["metadata"]["status"] == "success"
    assert {"init_start", "init_stop", "run_start", "global_batch_size", "seed"} < set(keys)
