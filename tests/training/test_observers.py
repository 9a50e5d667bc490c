"""Trackers: what reaches them, and that none of them can harm a run. The line of a running training."""

import logging
import os
import posixpath
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from observed import epoch_of, plan_of, scored, step_of
from tqdm import tqdm

from ssdctl.files import write_text
from ssdctl.training.observers import End, Saved, Summary
from ssdctl.training.observers.display import FIRST_STEPS, Pace
from ssdctl.training.observers.services import _key, mlflow
from ssdctl.training.observers.trackers import (
    BackgroundTracker,
    Metrics,
    TrackedRun,
    Tracker,
    Trackers,
    metrics_of,
)


class Recording(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self.received: list[Any] = []
        self.is_abandoned = False

    def metrics(self, metrics: Metrics) -> None:
        self.received.append(metrics)

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        self.received.append((step, *images))

    def checkpoint(self, name: str, step: int, path: Path) -> None:
        self.received.append((name, step, path.name))

    def close(self, *, is_success: bool) -> None:
        self.received.append(is_success)

    def abandon(self) -> None:
        self.is_abandoned = True


def tracked(folder: Path, **changes: Any) -> TrackedRun:
    return TrackedRun("0" * 32, "run", folder, 0, {}, {}, [])._replace(**changes)


def train_record(step: int, **values: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "epoch": step / 10, "loss": 1.0 / step, **values}


def end(trackers: Trackers) -> None:
    trackers.on_end(End(9, "finished", Summary("run", 9, 1.0, None, 0, 1.0, 0.0)))


def opened(trackers: dict[str, Any], run: TrackedRun, **options: Any) -> Trackers:
    observer = Trackers(trackers, **options)
    observer.open(run)
    return observer


def test_figures_of_records() -> None:
    assert metrics_of(train_record(2, lr=None, ok=True)) == Metrics("train", 2, {"loss": 0.5})
    classes = {"kind": "event", "step": 2, "event": "class_ap", "AP": {"epoch": 0.5, "b": -1}}
    assert metrics_of(classes) == Metrics("class_AP", 2, {"epoch": 0.5})  # b has no objects
    assert metrics_of({"kind": "eval", "step": 2, "epoch": 1.0, "AP": -1.0, "loss": -1.0}) is None
    assert metrics_of({"kind": "event", "step": 2, "event": "started", "total_steps": 3}) is None
    assert metrics_of({"kind": "other", "step": 2, "x": 3}) is None


def test_a_tracker_gets_everything_in_order(tmp_path: Path) -> None:
    recording = Recording(tracked(tmp_path))
    (tmp_path / "best.pt").touch()
    trackers = opened({"recording": lambda run: recording}, recording.run, uploads=True)
    trackers.on_step(step_of(1))
    trackers.on_step(step_of(2, is_logged=False))
    trackers.on_report(step_of(2))
    trackers.on_epoch(epoch_of(2, 1, 3.0))
    trackers.on_evaluation(scored(2, AP=0.5, APs=-1.0, loss=2.0))
    trackers.on_checkpoint(Saved(2, "best", tmp_path / "best.pt"))
    trackers.on_checkpoint(Saved(2, "last", tmp_path / "absent.pt"))
    end(trackers)
    end(trackers)  # nothing is left to close
    (first, second, *others) = recording.received
    trained = [(m.group, m.step, m.values["loss"]) for m in (first, second)]
    assert trained == [("train", 1, 1.0), ("train", 2, 0.5)]
    assert others == [
        Metrics("epoch", 2, {"duration_s": 3.0, "images_per_second": 4.0}),
        Metrics("eval", 2, {"AP": 0.5, "loss": 2.0}),
        ("best", 2, "best.pt"),
        True,
    ]


class Uploading(Recording):
    def checkpoint(self, name: str, step: int, path: Path) -> None:
        self.run.config["begun"].set()
        self.run.config["event"].wait(60)
        self.received.append((name, step, path.name, path.read_text()))


def test_an_upload_has_the_weights_of_its_step(tmp_path: Path) -> None:
    events = {"begun": threading.Event(), "event": threading.Event()}
    uploading = Uploading(tracked(tmp_path, config=events))
    trackers = opened({"uploading": lambda run: uploading}, uploading.run, uploads=True)
    best = tmp_path / "best.pt"
    for step in (1, 2, 3):  # the last two replace the file during the first upload
        write_text(best, f"weights {step}")
        os.utime(best, (step, step))
        trackers.on_checkpoint(Saved(step, "best", best))
        events["begun"].wait(60)
    events["event"].set()
    end(trackers)
    uploads = [("best", step, "best.pt", f"weights {step}") for step in (1, 3)]
    assert uploading.received == [*uploads, True]
    assert list(tmp_path.iterdir()) == [best]


class Hanging(Recording):
    def metrics(self, metrics: Metrics) -> None:
        super().metrics(metrics)
        self.run.config["event"].wait(60)


def test_a_hanging_tracker_is_left_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    event = threading.Event()
    hanging = Hanging(tracked(tmp_path, config={"event": event}))
    tracker = BackgroundTracker("hanging", lambda run: hanging, hanging.run, max_waiting=3)
    begin = time.monotonic()
    for step in range(1, 100):
        tracker.call(lambda t, step=step: t.metrics(Metrics("train", step, {})))
    assert time.monotonic() - begin < 1
    assert len(caplog.records) == 1  # one warning for all that is dropped
    tracker.close(is_success=True, timeout_s=0.2)
    assert time.monotonic() - begin < 2
    assert hanging.is_abandoned
    assert len(hanging.received) == 1
    event.set()


class Failing(Recording):
    def metrics(self, metrics: Metrics) -> None:
        if metrics.step < 3:
            raise ValueError("no connection to https://bob:S3CRET@host/")
        super().metrics(metrics)


def test_a_tracker_that_fails_warns_once_and_is_called_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(tracked(tmp_path))
    trackers = opened({"failing": lambda run: failing}, failing.run)
    for step in (1, 2, 3):
        trackers.on_step(step_of(step))
    end(trackers)
    assert [m.step for m in failing.received[:-1]] == [3]
    assert failing.received[-1] is True
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "failing" in record.message
    assert "S3CRET" not in record.message


def test_a_process_with_a_hanging_tracker_exits() -> None:
    script = """
        import time
        from ssdctl.training.observers.trackers import BackgroundTracker, TrackedRun
        run = TrackedRun("0", "run", ".", 0, {}, {}, [])
        tracker = BackgroundTracker("x", lambda run: time.sleep(600), run)
        tracker.close(is_success=True, timeout_s=0.1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=30, check=True)


def test_names_for_mlflow() -> None:
    names = ["AP50", "ring", "a/b", "a<b", "中文", "..", "", "x" * 500]
    keys = [_key("class_AP", name) for name in names]
    assert keys[:2] == ["class_AP/AP50", "class_AP/ring"]
    assert len(set(keys)) == len(names)
    assert all(len(k) < 250 and k.count("/") == 1 and posixpath.normpath(k) == k for k in keys)


def test_mlflow_without_a_server_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "other://host")
    with pytest.raises(Exception, match="pip install mlflow"):
        mlflow(tracked(tmp_path)).open()


class Run:
    """The pace of a run of 100 steps."""

    def __init__(self, val_images: int = 0, **changes: Any) -> None:
        self.now, self.plan = 100.0, plan_of(80, batch_size=8, epochs=10, **changes)
        self.pace = Pace(self.plan, 0, val_images, lambda: self.now)

    def take(self, steps: range, each_s: float) -> None:
        for step in steps:
            self.now += each_s
            self.pace.step_done(step)

    def line(self) -> str:
        how = {"ncols": 80, "bar_format": self.pace.bar_format(80)}
        return tqdm.format_meter(self.pace.step, self.plan.total_steps, 1.0, **how)


def test_the_time_left_is_known_after_three_steps_and_runs_with_the_clock() -> None:
    run = Run()
    assert "0/100" in run.line()
    run.take(range(1, FIRST_STEPS), 2.0)
    assert run.pace.time_left() == ""
    run.take(range(FIRST_STEPS, FIRST_STEPS + 1), 2.0)
    assert run.pace.time_left() == "3:14"  # 97 steps of 2 s
    run.now += 4
    assert run.pace.time_left() == "3:10"
    assert "3:10" in run.line()


@pytest.mark.parametrize(
    ("each_s", "left"), [(1.0, "1:30"), (144.0, "3:36:00"), (2400.0, "2 d 12 h")]
)
def test_the_first_step_does_not_count(each_s: float, left: str) -> None:
    run = Run()
    run.take(range(1, 2), 60.0)
    run.take(range(2, 11), each_s)
    assert run.pace.time_left() == left


def test_evaluations_count_with_their_measured_time() -> None:
    run = Run(val_images=40, eval_every="50st")
    run.take(range(1, 51), 1.0)
    assert run.pace.time_left() == "0:52"  # one evaluation more, as 40 x 0.4 / 8 steps
    run.pace.evaluation_begins()
    assert "evaluating" in run.line()
    run.now += 30
    run.pace.evaluation_ends()
    assert run.pace.time_left() == "1:20"  # 50 steps and another evaluation
    run.take(range(51, 61), 1.0)
    assert run.pace.time_left() == "1:10"
