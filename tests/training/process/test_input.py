"""Runs with damaged data, runs without data, runs that need a package that is not installed."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from helpers import Train, records

from ssdctl.config import PrepareConfig
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.training import step_input, trainer


def bad_images(run: Path) -> list[dict[str, Any]]:
    return [r for r in records(run, "event") if r["event"] == "bad_image"]


def spoil_after_the_start(root: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Cut some training images once the run has checked its data; return their ids."""
    split = open_dataset(root, root / "prepared")["train"]
    rows = split.trainable[:number]
    begin = trainer.find_checkpoint

    def spoiled(*given: Any) -> Any:
        for row in rows:
            path = Path(split.location(int(row)))
            path.write_bytes(path.read_bytes()[:2000])
        return begin(*given)

    monkeypatch.setattr(trainer, "find_checkpoint", spoiled)
    return [int(split.image_ids[row]) for row in rows]


def test_images_that_go_bad_in_a_run_are_replaced_and_named(
    shapes: Path, dataset: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = spoil_after_the_start(dataset, monkeypatch, 2)
    words = train("--steps", 13, data=dataset)  # one epoch
    reported = bad_images(tmp_path / "run")
    assert {event["image_id"] for event in reported} == set(bad)
    for event in reported:
        assert event["file"].endswith(f"{event['image_id']:012d}.jpg")
        assert event["problem"]
        assert event["replaced_by"] not in bad
        assert f"image {event['image_id']} " in words
    shutil.copytree(shapes / "train2017", dataset / "train2017", dirs_exist_ok=True)
    train("--steps", 26, data=dataset)  # spoiled again; each is named once per run
    assert bad_images(tmp_path / "run") == reported


def test_too_many_bad_images_end_the_run(
    dataset: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_input, "MIN_LIMIT", 3)
    spoil_after_the_start(dataset, monkeypatch, 12)
    assert "metrics.jsonl" in train("--steps", 13, data=dataset, code=3)
    assert len(bad_images(tmp_path / "run")) == 4


def test_fake_data_needs_no_dataset_and_takes_the_sizes_of_one_that_is_there(
    cli: Cli, tmp_path: Path, train: Train
) -> None:
    data = Path("nowhere")
    plan = cli("train", "--fake-data", "--data", data, "--bs", 32, "--dry-run", "--json").expect(0)
    assert json.loads(plan.out)["images"] == 117_266
    assert "fake data" in train("--fake-data", "--steps", 2, data=data)
    assert not data.exists()
    train("--steps", 3, data=data, code=3)
    train("--fake-data", "--steps", 1, out=tmp_path / "other")
    assert not records(tmp_path / "other", "eval")


@pytest.mark.skipif(
    bool(importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")),
    reason="nvidia-dali is installed",
)
def test_dali_that_is_not_installed_is_named_first(tmp_path: Path, train: Train) -> None:
    words = train("--pipeline", "dali", data=tmp_path / "nothing", code=2)
    assert "pip install nvidia-dali-cuda" in words


def test_a_validation_image_that_does_not_open_counts_without_detections(
    checkpoint: Path, dataset: Path, cli: Cli
) -> None:
    (dataset / "val2017/000000000002.jpg").write_bytes(b"spoiled")
    prepare(dataset, dataset / "prepared", PrepareConfig(pack=False, allow_dropped=True))
    options = ["--data", dataset, "--device", "cpu", "--score-threshold", 0.01, "--json"]
    result = cli("evaluate", checkpoint, *options, "--detections", "found.json")
    result.expect(0, "1 images cannot be decoded")
    assert json.loads(result.out)["images"] == 9
    image_ids = {d["image_id"] for d in json.loads(Path("found.json").read_text())}
    assert image_ids
    assert 2 not in image_ids
