"""The rules for few pictures and for fine-tuning, freezing, and the validation loss."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Result
from torch import Tensor

from ssdctl.checkpoint.reader import read_checkpoint
from ssdctl.config.resolve import Override, Resolved, resolve
from ssdctl.config.sources import of_call
from ssdctl.distributed.ranks import Ranks
from ssdctl.training.run import finalize
from ssdctl.training.schedule import TrainSchedule
from ssdctl.training.small_data import adapt_to_data

Cli = Callable[..., Result]
RUN = "--backbone tiny --backbone-weights none --workers 1 --fp32 --device cpu --log-every 1"


def settings(**values: object) -> Resolved:
    overrides = [
        Override(f"train.{key}", value, of_call("--option")) for key, value in values.items()
    ]
    return resolve(overrides=overrides, environment={}, default_file=False)


def plan_of(resolved: Resolved, images: int, world_size: int = 1) -> TrainSchedule:
    return finalize(resolved, None, Ranks(0, world_size, 0), images).plan


@pytest.mark.parametrize(
    ("images", "total", "warmup"),
    [(9, 1000, 50), (100, 1000, 50), (300, 1012, 50), (2000, 5000, 250)],
)
def test_few_images_get_enough_steps(images: int, total: int, warmup: int) -> None:
    plan = plan_of(settings(), images)
    assert (plan.total_steps, plan.warmup_steps) == (total, warmup)
    assert plan.global_batch_size == 8
    assert plan.peak_lr == pytest.approx(1.4e-3)
    assert plan.lr(total) < 0.02 * plan.peak_lr  # the cosine ends with the run


@pytest.mark.parametrize("images", [9, 100, 300])
def test_fine_tuning_is_shorter_at_a_lower_rate(images: int) -> None:
    new, tuned = plan_of(settings(), images), plan_of(settings(init="x.pt"), images)
    assert tuned.total_steps == 375
    assert tuned.peak_lr < 0.8 * new.peak_lr


@pytest.mark.parametrize(("world_size", "is_frozen"), [(1, False), (2, True)])
def test_small_batches_keep_the_statistics_of_batch_norm(world_size: int, is_frozen: bool) -> None:
    train = adapt_to_data(settings(init="x.pt"), 100, world_size).resolved.config.train
    assert train.freeze_norm == is_frozen


@pytest.mark.parametrize("images", [5_000, 117_266])
@pytest.mark.parametrize("init", [None, "x.pt"])
def test_many_images_keep_the_recipe(images: int, init: str | None) -> None:
    resolved = settings() if init is None else settings(init=init)
    assert adapt_to_data(resolved, images, 1) == (resolved, None)
    plan = plan_of(resolved, images)
    assert plan.total_steps == 65 * images // 32
    assert plan.warmup_steps == 5 * images // 32
    assert plan.peak_lr == 2.5e-3


@pytest.mark.parametrize("preset", ["stable-r34", "mlperf-r34", "nvidia-r50"])
def test_a_named_preset_is_used_as_it_is(preset: str) -> None:
    resolved = settings(preset=preset)
    assert adapt_to_data(resolved, 100, 1) == (resolved, None)


def test_values_of_the_user_win() -> None:
    chosen = {"epochs": 3, "warmup": "2st", "batch_size": 5, "eval_every": "7st"}
    adapted = adapt_to_data(settings(**chosen), 100, 1)
    assert {k: getattr(adapted.resolved.config.train, k) for k in chosen} == chosen
    assert adapted.resolved.config.train.decay_epochs[-1] == 3
    assert adapted.rule is not None
    assert not any(f" {name} " in adapted.rule for name in chosen)
    assert "adamw" in adapted.rule


@pytest.mark.parametrize(
    "choice", [{"lr": 1e-3}, {"optimizer": "sgd"}, {"weight_decay": 1e-4}, {"momentum": 0.8}]
)
def test_an_explicit_rate_keeps_the_optimizer_of_the_preset(choice: dict[str, object]) -> None:
    train = adapt_to_data(settings(**choice), 100, 1).resolved.config.train
    preset = settings(**choice).config.train
    for name in ("optimizer", "lr", "weight_decay", "momentum"):
        assert getattr(train, name) == getattr(preset, name)


def test_more_steps_than_the_rule_takes_extend_the_run() -> None:
    plan = plan_of(settings(steps=3000), 100)
    assert plan.total_steps == 3000
    assert plan.decay_steps[-1] == 3000


@pytest.mark.parametrize("steps", [1, 20, 61, 998])
@pytest.mark.parametrize("images", [7, 100, 333])
def test_fewer_steps_than_the_rule_takes_rescale_its_schedule(steps: int, images: int) -> None:
    plan, full = plan_of(settings(steps=steps), images), plan_of(settings(), images)
    assert plan.total_steps == plan.decay_steps[-1] == steps
    assert plan.warmup_steps == max(steps // 20, 1)
    assert plan.lr(steps) == pytest.approx(full.lr(full.total_steps))


def test_the_global_batch_counts_ranks() -> None:
    assert plan_of(settings(), 100, world_size=4).global_batch_size == 8
    assert plan_of(settings(), 100, world_size=16).global_batch_size == 16


@pytest.mark.parametrize("preset", [None, "mlperf-r34"])
def test_a_warmup_of_a_preset_never_refuses_the_run(preset: str | None) -> None:
    resolved = settings(steps=50) if preset is None else settings(steps=50, preset=preset)
    assert plan_of(resolved, 117_266).warmup_steps == 5


@pytest.mark.process
def test_the_plan_names_the_rule(cli: Cli, shapes: Path) -> None:
    plan = json.loads(cli("train", "--data", shapes, "--dry-run", "--json").out)
    assert "small-data rule" in plan["recipe"]
    assert "adamw" in plan["recipe"]
    named = cli("train", "--data", shapes, "--dry-run", "--json", "--preset", "stable-r34")
    assert json.loads(named.out)["recipe"] == "preset stable-r34"
    human = cli("train", "--data", shapes, "--dry-run").out
    assert "small-data rule" in " ".join(human.split())


def test_a_run_records_the_rule(cli: Cli, shapes: Path) -> None:
    result = cli("train", "--data", shapes, "--out", "run", *RUN.split(), "--steps", 2)
    assert result.code == 0, result.err
    assert "small-data rule" in result.err
    text = Path("run/config.toml").read_text()
    assert 'optimizer = "adamw"  # small-data rule' in text
    again = cli("train", "--data", shapes, "--out", "run", *RUN.split(), "--steps", 4)
    assert again.code == 0, again.err  # a resume is not refused because of what the rule chose
    assert json.loads(cli("train", "--data", shapes, "--out", "run", "--json", *RUN.split(),
                          "--steps", 4).out)["step"] == 4  # fmt: skip


def weights(run: Path) -> dict[str, Tensor]:
    return read_checkpoint(run / "checkpoints" / "last.pt").model


def fine_tune(cli: Cli, shapes: Path, tiny_run: Path, *options: object) -> dict[str, Tensor]:
    last = tiny_run / "checkpoints" / "last.pt"
    result = cli("train", "--data", shapes, "--out", "tuned", "--init", last, "--steps", 3,
                 "--workers", 1, "--fp32", "--device", "cpu", *options)  # fmt: skip
    assert result.code == 0, result.err
    assert "fine-tuning rule" in result.err
    return weights(Path("tuned"))


def changed(before: dict[str, Tensor], after: dict[str, Tensor], part: str) -> set[str]:
    """Return the tensors of a part of the network that differ."""
    return {k for k in before if k.startswith(part) and not torch.equal(before[k], after[k])}


def test_frozen_stages_do_not_change(cli: Cli, shapes: Path, tiny_run: Path) -> None:
    before = weights(tiny_run)
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
    Path("tuned/train.log").touch()  # of a shell: ssdctl train --out tuned > tuned/train.log
    before = weights(tiny_run)
    after = fine_tune(cli, shapes, tiny_run, "--bs", 4)
    assert before.keys() == after.keys()
    assert not any("running_" in name for name in changed(before, after, ""))
    assert "backbone.bn1.weight" in changed(before, after, "backbone.bn1")


@pytest.mark.slow(in_ci=True)
def test_the_validation_loss_is_the_training_loss_of_those_pictures(
    cli: Cli, shapes: Path, tiny_run: Path
) -> None:
    """Frozen weights at a rate of nearly 0: both losses are of the same network and pictures."""
    result = cli(
        "train", "--data", shapes, "--out", "run", "--init", tiny_run / "checkpoints" / "last.pt",
        "--overfit", 2, "--bs", 2, "--steps", 1, "--lr", 1e-12, "--freeze-norm", "--warmup", "0",
        "--workers", 1, "--fp32", "--device", "cpu", "--log-every", 1,
    )  # fmt: skip
    assert result.code == 0, result.err
    lines = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    records = {line["kind"]: line for line in lines}
    for name in ("loss", "loss_box", "loss_class"):
        assert records["eval"][name] == pytest.approx(records["train"][name], rel=1e-3)
    assert "val loss" in result.err


@pytest.mark.slow
def test_the_optuna_example_resumes(shapes: Path, tiny_run: Path) -> None:
    pytest.importorskip("optuna")
    script = Path(__file__).parents[2] / "docs" / "tune_with_optuna.py"
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
