"""The rules for few images and for fine-tuning, freezing, and the validation loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Cli
from helpers import last, records
from torch import Tensor

RUN = "--backbone tiny --backbone-weights none --workers 1 --fp32 --device cpu --log-every 1"


def test_a_run_records_the_rule(cli: Cli, shapes: Path) -> None:
    command = ["train", "--data", shapes, "--out", "run", *RUN.split()]
    result = cli(*command, "--steps", 2)
    assert result.code == 0, result.err
    assert "small-data rule, fitted to --steps 2" in " ".join(result.err.split())
    assert 'optimizer = "adamw"  # small-data rule' in Path("run/config.toml").read_text()
    again = cli(*command, "--steps", 4)
    assert again.code == 0, again.err
    assert "4 steps, the last 2 in" in again.out
    rates = [record["lr"] for record in records(Path("run"), "train")]
    assert rates[1] == max(rates)  # the cosine ended with step 2 and does not start again
    assert "ends at step 2" in " ".join(again.err.split())


def fine_tune(cli: Cli, shapes: Path, tiny_run: Path, *options: object) -> dict[str, Tensor]:
    command = ["train", "--data", shapes, "--out", "tuned", "--init", tiny_run, "--steps", 3]
    result = cli(*command, "--workers", 1, "--fp32", "--device", "cpu", *options)
    assert result.code == 0, result.err
    assert "fine-tuning rule" in result.err
    return last(Path("tuned")).model


def changed(before: dict[str, Tensor], after: dict[str, Tensor], part: str) -> set[str]:
    """Return the tensors of a part of the network that differ."""
    return {k for k in before if k.startswith(part) and not torch.equal(before[k], after[k])}


def test_frozen_stages_do_not_change(cli: Cli, shapes: Path, tiny_run: Path) -> None:
    before = last(tiny_run).model
    after = fine_tune(cli, shapes, tiny_run, "--freeze", 2, "--no-freeze-norm")
    for part in ("backbone.conv1", "backbone.bn1", "backbone.layer1"):
        assert any(name.startswith(part) for name in before)
        assert changed(before, after, part) == set()
    assert any(name.endswith("running_mean") for name in changed(before, after, "backbone.layer2"))
    assert "backbone.layer3.0.conv1.weight" in changed(before, after, "backbone.layer3")


def test_fine_tuning_takes_the_network_of_the_checkpoint(
    cli: Cli, shapes: Path, tiny_run: Path
) -> None:
    """The default preset is a ResNet-34, the checkpoint a ResNet-18; batches of 4 are small.

    A log file in the run folder does not make it a run to resume.
    """
    Path("tuned").mkdir()
    Path("tuned/train.log").touch()  # as a shell does: ssdctl train --out tuned > tuned/train.log
    before = last(tiny_run).model
    after = fine_tune(cli, shapes, tiny_run, "--bs", 4)
    assert before.keys() == after.keys()
    assert not any("running_" in name for name in changed(before, after, ""))
    assert "backbone.bn1.weight" in changed(before, after, "backbone.bn1")


def test_the_validation_loss_is_the_training_loss_of_those_images(
    cli: Cli, shapes: Path, tiny_run: Path
) -> None:
    """Frozen weights at a rate of nearly 0: both losses are of the same network and images."""
    result = cli(
        "train", "--data", shapes, "--out", "run", "--init", tiny_run,
        "--overfit", 2, "--bs", 2, "--steps", 1, "--lr", 1e-12, "--freeze-norm", "--warmup", "0",
        "--workers", 1, "--fp32", "--device", "cpu", "--log-every", 1,
    )  # fmt: skip
    assert result.code == 0, result.err
    (evaluated,), (trained,) = (records(Path("run"), kind) for kind in ("eval", "train"))
    for name in ("loss", "loss_box", "loss_class"):
        assert evaluated[name] == pytest.approx(trained[name], rel=1e-3)
    assert "val loss" in result.err


@pytest.mark.slow
def test_the_optuna_example_resumes(shapes: Path, tiny_run: Path) -> None:
    pytest.importorskip("optuna")
    script = Path(__file__).parents[3] / "docs" / "tune_with_optuna.py"
    command: list[str] = [
        sys.executable, str(script), "--data", str(shapes),
        "--init", str(tiny_run / "checkpoints" / "last.pt"),
        "--out", "search",
    ]  # fmt: skip
    options = ["--", "--steps", "1", "--bs", "2", "--fp32", "--device", "cpu", "--workers", "1"]
    for trials in (1, 2):
        done = subprocess.run([*command, "--trials", str(trials), *options], capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
        assert {"AP", "lr", "freeze"} < set(json.loads(done.stdout))
        assert len(list(Path("search").glob("trial-*"))) == trials
