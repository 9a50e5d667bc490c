"""A run that is killed and resumed has one run in each tracker, with the metrics of metrics.jsonl."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers import start, train_command, wait_for

from ssdctl.training.observers.services import _key
from ssdctl.training.observers.trackers import metrics_of

pytestmark = pytest.mark.slow
Measurements = dict[tuple[str, int], float]  # (group/name, step) -> value


def recorded(run: Path) -> Measurements:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        (f"{m.group}/{name}", m.step): value
        for m in map(metrics_of, lines)
        if m is not None
        for name, value in m.values.items()
    }


def killed_and_resumed(shapes: Path, run: Path, *options: object, **variables: str) -> str:
    """Kill a run of 8 steps after its fifth, end it, and return what its second start printed."""
    every = ("--steps", 8, "--save-every", "2st", "--eval-every", "3st")
    command = train_command(shapes, run, *every, *options)
    process = start(*command, **variables)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and '"train", "step": 5' in metrics.read_text(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    process = start(*command, **variables)
    _, words = process.communicate(timeout=300)
    assert process.returncode == 0, words
    return words


def test_mlflow(shapes: Path, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = f"file:{tmp_path / 'mlruns'}"
    variables = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    run = tmp_path / "run"
    words = killed_and_resumed(
        shapes, run, "--tracker", "mlflow", "--upload-checkpoints", **variables
    )
    assert "warning: tracker" not in words, words
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = mlflow.tracking.MlflowClient(store)
    experiment = client.get_experiment_by_name("ssdctl").experiment_id
    (tracked,) = client.search_runs([experiment])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["train.steps"] == "8"
    assert tracked.data.params["environment.device"]
    expected = recorded(run)
    actual: Measurements = {}
    for name in tracked.data.metrics:
        # Of the steps that were trained twice the last value counts.
        history = sorted(client.get_metric_history(tracked.info.run_id, name), key=lambda m: m.timestamp)  # fmt: skip
        actual |= {(name, m.step): m.value for m in history}
    keyed = {(_key(*name.split("/", 1)), step): v for (name, step), v in expected.items()}
    assert actual == pytest.approx(keyed)
    files = {f.path for f in client.list_artifacts(tracked.info.run_id, "checkpoints")}
    assert files == {"checkpoints/best.pt", "checkpoints/last.pt"}
    assert len(client.list_artifacts(tracked.info.run_id, "images")) == 4


def test_wandb_offline(shapes: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    words = killed_and_resumed(shapes, run, "--tracker", "wandb", "--upload-checkpoints", WANDB_MODE="offline")  # fmt: skip
    assert "warning: tracker" not in words, words
    identity = (run / "tracker-id").read_text().strip()
    files = sorted((run / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 2  # one for each start, of one run
    assert sorted((run / "wandb").glob("offline-run-*/*.wandb")) == files
    content = files[-1].read_bytes()
    numbers = {float(text) for text in re.findall(rb"\d+\.?\d*(?:e[-+]\d+)?", content)}
    assert len({*recorded(run).values()} - numbers) <= 2  # at the edges of its blocks
    assert all(word in content for word in (b"train.steps", b"checkpoint-", b"best"))
    assert list((run / "wandb").rglob("media/images/**/*.png"))
