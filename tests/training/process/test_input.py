"""Runs with damaged data, runs without data, runs that need a package that is not installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_RUN, Result

from ssdctl.data.open_dataset import open_dataset
from ssdctl.training import failures

Cli = Callable[..., Result]
OPTIONS = TINY_RUN.split()


def events(run: Path, name: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


def spoil_after_the_start(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Cut some training images once the run has checked its data; return their ids."""
    from ssdctl.training import setup

    split = open_dataset(root, root / "prepared")["train"]
    rows = split.trainable[:number]
    begin = setup.load_first_weights

    def spoiled(*given: Any) -> Any:
        for row in rows:
            path = Path(split.place(int(row)))
            path.write_bytes(path.read_bytes()[:2000])
        return begin(*given)

    monkeypatch.setattr(setup, "load_first_weights", spoiled)
    return [int(split.image_ids[row]) for row in rows]


def test_images_that_go_bad_in_a_run_are_replaced_and_named(
    dataset: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = spoil_after_the_start(dataset, monkeypatch, 2)
    run = tmp_path / "run"
    result = cli("train", "--data", dataset, "--out", run, "--steps", 13, *OPTIONS)  # one epoch
    assert result.code == 0, result.err
    reported = events(run, "bad_image")
    assert {event["image_id"] for event in reported} == set(bad)
    for event in reported:
        assert event["file"].endswith(f"{event['image_id']:012d}.jpg")
        assert "truncated" in event["problem"]
        assert event["replaced_by"] not in bad
        assert f"image {event['image_id']} " in result.err


def test_too_many_bad_images_end_the_run(
    dataset: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "MIN_LIMIT", 3)
    spoil_after_the_start(dataset, monkeypatch, 12)
    run = tmp_path / "run"
    result = cli("train", "--data", dataset, "--out", run, "--steps", 13, *OPTIONS)
    assert result.code == 3, result.err
    assert "4 images could not be decoded, the limit is 3" in result.err
    assert len(events(run, "bad_image")) == 4


@pytest.mark.slow
def test_two_ranks_end_alike_when_images_are_lost(dataset: Path, tmp_path: Path) -> None:
    """Deleted under a run without a packed store; each rank reads another half of them."""
    split = open_dataset(dataset, dataset / "prepared")["train"]
    run = tmp_path / "run"
    options = [*OPTIONS, "--bs", "1", "--epochs", "1000"]
    command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", "--data", str(dataset)]
    process = subprocess.Popen(
        [*command, "--out", str(run), *options], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for row in split.trainable[:12]:
        Path(split.place(int(row))).unlink()
    _, words = process.communicate(timeout=120)
    assert process.returncode == 3, words
    assert "images could not be trained on, more than 10" in words
    lost = set(split.image_ids[split.trainable[:12]].tolist())
    reported = events(run, "bad_image")
    assert len({event["image_id"] for event in reported}) == len(reported) > 10
    assert {event["image_id"] for event in reported} <= lost
    assert not lost & {event["replaced_by"] for event in reported}


def test_fake_data_needs_no_dataset(tmp_path: Path, cli: Cli) -> None:
    plan = cli("train", "--fake-data", "--data", "nowhere", "--bs", 32, "--dry-run", "--json")
    assert plan.code == 0, plan.err
    assert json.loads(plan.out)["images"] == 117_266
    run = tmp_path / "run"
    options = ["train", "--fake-data", "--data", "nowhere", "--out", run, "--steps", 2, *OPTIONS]
    result = cli(*options, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["step"] == 2
    assert "fake data" in result.err
    assert not Path("nowhere").exists()
    again = cli("train", "--data", "nowhere", "--out", run, "--steps", 3, *OPTIONS)
    assert again.code == 3, again.err


def test_fake_data_takes_the_sizes_of_a_dataset_that_is_there(
    shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    result = cli("train", "--fake-data", "--data", shapes, "--out", run, "--steps", 1, *OPTIONS)
    assert result.code == 0, result.err
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert "eval" not in {line["kind"] for line in lines}


def test_another_pipeline_is_a_changed_setting(
    tiny_run: Path, shapes: Path, tmp_path: Path, cli: Cli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    result = cli("train", "--data", shapes, "--out", run, "--steps", 4, "--fake-data", *OPTIONS)
    assert result.code == 2, result.err
    assert "train.fake_data" in result.err


@pytest.mark.skipif(
    bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")),
    reason="nvidia-dali is installed",
)
def test_dali_that_is_not_installed_is_named_first(tmp_path: Path, cli: Cli) -> None:
    result = cli("train", "--pipeline", "dali", "--data", tmp_path / "nothing", *OPTIONS)
    assert result.code == 2, result.err
    assert "pip install nvidia-dali-cuda" in result.err
