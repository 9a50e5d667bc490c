"""Options of the loop: when it evaluates and ends, averaging, and its messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, Result
from run_processes import assert_same_state, last, records

from ssdctl.checkpoint.reader import Checkpoint, read_checkpoint
from ssdctl.runs.progress import describe
from ssdctl.training import setup
from ssdctl.training.ema import EMA
from ssdctl.training.evaluator import EarlyStopping
from ssdctl.training.throughput import ThroughputMeter

Cli = Callable[..., Result]
OPTIONS = TINY_RUN.split()


@pytest.mark.slow(in_ci=True)
def test_evaluates_at_the_given_epochs_and_ends_without_gain(
    shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    """A network that learns nothing (a rate near 0) has the same AP again and again."""
    run = tmp_path / "run"
    # 20 images in batches of 2: an epoch is 10 steps.
    options = ["--steps", 30, "--lr", 1e-9, "--patience", 3, "--limit-train", 20]
    options += ["--eval-at", "0.1,0.2", "--eval-every", "3st"]
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, *options)
    assert result.code == 0, result.err
    steps = [r["step"] for r in records(run, "eval")]
    assert steps[:4] == [1, 2, 3, 6]  # the one of step 6 is the third without a gain
    assert "--patience" in result.err
    stopped = last(run).step
    assert stopped < 30  # a score is recorded some steps after its detections
    # The next start counts the evaluations of this one.
    assert cli("train", "--data", shapes, "--out", run, *OPTIONS, *options).code == 0
    assert last(run).step == stopped


def test_ends_at_the_target(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    best = EarlyStopping(None, 0.5, None)
    assert best.update(0.3)
    assert best.reason_to_end() is None
    assert best.update(0.5)
    assert "--target-ap" in str(best.reason_to_end())
    assert not best.update(0.4)


def test_an_evaluation_without_objects_has_no_ap() -> None:
    best = EarlyStopping(-1.0, 0.5, 1)
    assert not best.update(-1.0)
    assert not best.update(-1.0)
    assert best.ap is None
    assert best.reason_to_end() is None
    figures = {"AP": -1.0, "AP50": -1.0, "AP75": -1.0, "loss": -1.0}
    line = describe({"kind": "eval", "step": 3, "epoch": 0.75, **figures})
    assert "no AP" in line
    assert "-1" not in line


def test_overfits_few_images_and_scores_on_them(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    options = ["--overfit", 3, "--steps", 3]
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, *options)
    assert result.code == 0, result.err
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["about"]["images"] == 3
    assert evaluation["about"]["split"] == "train"
    assert last(run).images == 3


@pytest.mark.slow(in_ci=True)
def test_average_of_the_weights(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """It is evaluated; training continues from the weights themselves, resumed or not."""
    plain, averaged = tmp_path / "plain", tmp_path / "averaged"
    command = ["train", "--data", shapes, *OPTIONS, "--lr", "1e-2"]
    assert cli(*command, "--out", plain, "--steps", 4).code == 0
    assert cli(*command, "--out", averaged, "--steps", 2, "--ema", 0.5).code == 0
    result = cli(*command, "--out", averaged, "--steps", 4, "--ema", 0.5)
    assert result.code == 0, result.err
    actual, expected = last(averaged), last(plain)
    assert actual.trained is not None
    assert_same_state(actual._replace(model=actual.trained), expected)
    name = "box_heads.0.weight"
    assert not torch.equal(actual.model[name], actual.trained[name])
    straight = tmp_path / "straight"
    assert cli(*command, "--out", straight, "--steps", 4, "--ema", 0.5).code == 0
    assert_same_state(actual, last(straight))


def test_average_keeps_the_share_of_its_decay() -> None:
    model = torch.nn.Linear(2, 1)
    start = model.weight.detach().clone()
    ema = EMA(model, 0.75)
    for _ in range(2):
        model.weight.data += 1
        ema.update()
    # 0.75 x 0.25 of the first step, 0.25 x 2 of the second
    assert torch.allclose(ema.state()["weight"], start + 0.6875)


def test_an_update_of_the_average_does_not_list_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of all weights takes the host as long as a step of a small network."""
    model = torch.nn.Linear(2, 1)
    ema = EMA(model, 0.75)
    monkeypatch.setattr(model, "state_dict", None)
    ema.update()


def test_the_checkpoint_of_init_is_read_once(
    shapes: Path, tmp_path: Path, cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def counted(path: Path) -> Checkpoint:
        read.append(path)
        return read_checkpoint(path)

    monkeypatch.setattr(setup, "read_checkpoint", counted)
    command = ["train", "--data", shapes, "--out", tmp_path / "run", "--init", checkpoint]
    result = cli(*command, "--steps", 1, "--workers", 1, "--device", "cpu", "--warmup", "1st")
    assert result.code == 0, result.err
    assert read == [checkpoint]


def test_writes_tensorboard_and_mlperfs_log(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("tensorboard", reason="the extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run, log = tmp_path / "run", tmp_path / "mlperf.log"
    options = ["--steps", 2, "--tensorboard", "--mllog", log, "--deterministic"]
    try:
        result = cli("train", "--data", shapes, "--out", run, *OPTIONS, *options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.code == 0, result.err
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


def test_throughput_reports_once_that_training_is_input_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = ThroughputMeter(global_batch=8)
    pace.start()
    results = []
    for _ in range(8):
        with pace.waiting():
            now[0] += 0.5
        now[0] += 0.5
        pace.step_done()
        with pace.paused():
            now[0] += 100
        lap = pace.lap()
        assert lap.images_per_second == pytest.approx(8)
        assert lap.data_wait == pytest.approx(0.5)
        results.append(pace.is_input_bound())
    assert results == [False] * 4 + [True] + [False] * 3
    assert pace.images_per_second == pytest.approx(8)
    assert pace.data_wait == pytest.approx(0.5)
