"""Runs and their options: what they write, how they end, what a bad step leads to, two ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from conftest import Cli, run_cli
from helpers import assert_same_state, last, records

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.input import augmentations, sampler
from ssdctl.input.augmentations.ssd import color

if TYPE_CHECKING:
    from training.process.conftest import Train


def test_run_folder_contains_the_documented_files(tiny_run: Path, shapes: Path) -> None:
    for name in ("config.toml", "environment.json", "metrics.jsonl", "logs", "checkpoints/last.pt"):
        assert (tiny_run / name).exists(), name
    train = records(tiny_run, "train")
    assert [r["step"] for r in train] == [1, 2, 3]
    keys = {"kind", "step", "epoch", "loss", "loss_box", "loss_class", "lr", "images_per_second"}
    assert keys | {"grad_norm", "data_wait", "memory_bytes"} == set(train[0])
    assert train[0]["loss"] == pytest.approx(train[0]["loss_box"] + train[0]["loss_class"])
    (evaluation,) = records(tiny_run, "eval")
    metrics = {"AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs"}
    assert metrics < set(evaluation)
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
    finished = last(run)
    for quiet in ("-q", "--json"):
        assert "ssdctl report" not in train("--steps", 4, quiet)
    assert "step 4 of 4" in train("--steps", 4)
    assert_same_state(last(run), finished)


def test_each_epoch_has_a_record(tmp_path: Path, train: Train) -> None:
    """Eight images and batches of two: an epoch ends at steps 4 and 8, also across a resume."""
    assert "epoch 1 done" in train("--limit-train", 8, "--steps", 5)
    train("--limit-train", 8, "--steps", 9, "--log-every", 4)
    epochs = records(tmp_path / "run", "epoch")
    assert [(r["step"], r["epoch"]) for r in epochs] == [(4, 1.0), (8, 2.0)]
    assert all(r["duration_s"] > 0 and r["images_per_second"] > 0 for r in epochs)
    assert [r["step"] for r in records(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 8, 9]


def test_an_epoch_ends_with_its_last_image(tmp_path: Path, train: Train) -> None:
    """Five images and batches of two: step 3 takes the last image of the first epoch."""
    train("--limit-train", 5, "--steps", 6)
    assert [r["step"] for r in records(tmp_path / "run", "epoch")] == [3, 5]


def test_a_run_ends_at_its_target(tmp_path: Path, train: Train) -> None:
    assert "--target-ap" in train("--steps", 60, "--eval-every", "1st", "--target-ap", 1e-6)
    assert last(tmp_path / "run").step < 60


def test_overfitting_scores_the_images_that_it_trains_on(tmp_path: Path, train: Train) -> None:
    train("--overfit", 2, "--steps", 1)
    about = json.loads((tmp_path / "run/evaluation.json").read_text())["about"]
    assert (about["images"], about["split"]) == (2, "train")


@pytest.mark.slow(in_ci=True)
def test_average_of_the_weights(tmp_path: Path, train: Train) -> None:
    """It is evaluated; training continues from the weights themselves, resumed or not."""
    plain, averaged, straight = (tmp_path / name for name in ("plain", "averaged", "straight"))
    train("--lr", "1e-2", "--steps", 4, out=plain)
    for steps in (2, 4):
        train("--lr", "1e-2", "--steps", steps, "--ema", 0.5, out=averaged)
    actual, expected = last(averaged), last(plain)
    assert actual.trained is not None
    assert_same_state(replace(actual, model=actual.trained), expected)
    name = "box_heads.0.weight"
    assert not torch.equal(actual.model[name], actual.trained[name])
    train("--lr", "1e-2", "--steps", 4, "--ema", 0.5, out=straight)
    assert_same_state(actual, last(straight))


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
    ends = ["epoch_stop", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert keys[-6:] == ends  # the epoch is not complete
    assert lines[-1]["metadata"]["status"] == "success"


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

    def noted(folder: CheckpointFolder, checkpoint: Checkpoint) -> None:
        saved.append((checkpoint.step, checkpoint.samples_seen))
        write(folder, checkpoint)

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
    # A rollback from step 4 to step 2 takes two more batches than a skip does. A run resumed from
    # there must not read the offending images again.
    rolled_back = [(2, 4), (2, 8), (4, 12), (6, 16)]
    assert saved == ([(2, 4), (4, 8), (6, 12)] if policy == "skip" else rolled_back)
    kinds = [r["event"] for r in records(run, "event")]
    assert ("rolled_back" in kinds) == (policy == "rollback")
    assert (trained[3]["loss"] == -1) == (policy == "skip")


@pytest.mark.parametrize(
    ("name", "backbone"), [("ssd300-vgg16-coco", "vgg16"), ("nvidia-ssd300-coco", "resnet50")]
)
def test_the_dry_run_knows_the_network_of_a_detector_that_is_not_here(
    cli: Cli, shapes: Path, name: str, backbone: str
) -> None:
    plan = cli("train", "--data", shapes, "--init", name, "--dry-run")
    assert plan.code == 0
    assert backbone in plan.out


def test_a_training_process_imports_no_package_that_takes_seconds(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from ssdctl.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as exit:\n"
        "    assert not exit.code, exit.code\n"
        "print('\\n' + json.dumps(list(sys.modules)))"
    )
    options = "--fake-data --steps 2 --warmup 1st --bs 1 --backbone tiny --backbone-weights none"
    command = ["train", *options.split(), "--device", "cpu", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-c", code, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert "torch" in loaded
    assert (tmp_path / "run/checkpoints/last.pt").exists()
    assert not loaded & {"torchvision", "torch._dynamo", "torch._inductor", "sympy"}


@pytest.mark.parametrize("preset", ["stable-r34", "habana-tf-r34"])
def test_a_run_that_steps_end_is_the_beginning_of_the_long_one(
    preset: str, shapes: Path, tmp_path: Path
) -> None:
    options = "--backbone tiny --backbone-weights none --bs 2 --workers 1 --fp32 --device cpu"
    for name, steps in (("short", 3), ("long", 5)):
        result = run_cli(
            "train", "--data", shapes, "--out", tmp_path / name, "--preset", preset,
            *options.split(), "--extra-norm", "none", "--steps", steps, "--save-every", "3st",
        )  # fmt: skip
        assert result.code == 0, result.err
    checkpoint = "checkpoints/step-00000003.pt"
    ends = [load_checkpoint(tmp_path / name / checkpoint) for name in ("short", "long")]
    assert_same_state(*ends)
