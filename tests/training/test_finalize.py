"""A run is settled once: what the user left open follows from device, data and checkpoint.

So do the rules for few images and for fine-tuning.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from conftest import Cli

from ssdctl.config import Config
from ssdctl.config.fields import DEVICE_TYPES, PresetName
from ssdctl.config.resolve import Kind, Override, Resolved, of_call, resolve
from ssdctl.distributed.ranks import SINGLE_PROCESS, Ranks
from ssdctl.errors import UsageError
from ssdctl.training.run import Network, adapt_to_data, finalize
from ssdctl.training.schedule import TrainSchedule

FEW, MANY = 100, 117_266


def settings(**values: object) -> Resolved:
    overrides = [Override(key.replace("__", "."), v, of_call("--x")) for key, v in values.items()]
    return resolve(overrides=overrides, environment={}, default_file=False)


def train_settings(**values: object) -> Resolved:
    return settings(**{f"train__{key}": value for key, value in values.items()})


def plan_of(resolved: Resolved, images: int, world_size: int = 1) -> TrainSchedule:
    return finalize(resolved, None, Ranks(0, world_size, 0), images).plan


def test_the_rule_for_few_images_uses_the_measured_batch() -> None:
    measured: list[Config] = []

    def largest_batch(config: Config) -> int:
        measured.append(config)
        return 512

    auto = settings(train__batch_size="auto")
    run = finalize(auto, None, SINGLE_PROCESS, FEW, largest_batch=largest_batch)
    same = finalize(settings(train__batch_size=512), None, SINGLE_PROCESS, FEW)
    assert run == same
    assert run.plan.batch_size == run.config.train.batch_size == 512
    assert run.plan.peak_lr == pytest.approx(2e-3)
    assert [config.train.optimizer for config in measured] == ["adamw"]
    with pytest.raises(UsageError, match="--bs auto"):
        finalize(auto, DEVICE_TYPES["cuda"], SINGLE_PROCESS, FEW)


def test_the_network_of_init_replaces_only_what_is_open() -> None:
    network = Network("resnet50", "batch")

    def backbone(**values: object) -> str:
        run = finalize(settings(**values), None, SINGLE_PROCESS, MANY, network=network)
        return run.config.model.backbone

    assert backbone() == "resnet50"
    assert backbone(model__backbone="resnet18") == "resnet18"
    assert backbone(train__preset="stable-r34") == "resnet34"


@pytest.mark.parametrize("kind", [Kind.FILE, Kind.ENVIRONMENT, Kind.CALL])
def test_a_chosen_precision_is_refused_and_a_presets_replaced(kind: Kind) -> None:
    cpu = DEVICE_TYPES["cpu"]
    preset = settings(train__preset="nvidia-r50")
    run = finalize(preset, cpu, SINGLE_PROCESS, MANY)
    assert run.precision != "fp16"
    (notice,) = run.notices
    assert "fp16" in notice
    source = preset.sources["train.precision"]._replace(kind=kind)
    with pytest.raises(UsageError, match="fp16"):
        finalize(preset.with_value("train.precision", "fp16", source), cpu, SINGLE_PROCESS, MANY)


def test_batch_norm_of_a_single_image_is_refused() -> None:
    norm = {"model__extra_norm": "batch"}
    with pytest.raises(UsageError, match="--bs 1"):
        finalize(settings(train__batch_size=1, **norm), None, SINGLE_PROCESS, MANY)
    for ranks, values in (
        (SINGLE_PROCESS, {"train__batch_size": 2, **norm}),
        (SINGLE_PROCESS, {"train__batch_size": 1}),
        (Ranks(0, 2, 0), {"train__batch_size": 1, "train__sync_bn": True, **norm}),
    ):
        batch_size = finalize(settings(**values), None, ranks, MANY).plan.batch_size
        assert batch_size == values["train__batch_size"]
    rule = finalize(settings(**norm), None, Ranks(0, 16, 0), FEW)
    assert rule.plan.batch_size == 2


def test_limits_and_ranks_are_part_of_the_plan() -> None:
    run = finalize(settings(train__overfit=3, train__limit_train=5), None, Ranks(0, 2, 0), FEW)
    assert run.plan.images == 3
    for world_size, global_batch in ((2, 8), (4, 8), (16, 16)):
        assert plan_of(settings(), FEW, world_size).global_batch_size == global_batch


@pytest.mark.parametrize(("empty", "background"), [(0, 0), (25, 25), (100, 100), (900, 100)])
def test_the_rule_for_few_images_takes_up_to_half_without_objects(
    empty: int, background: int
) -> None:
    run = finalize(settings(), None, SINGLE_PROCESS, FEW, background=empty)
    assert (run.plan.images, run.plan.background) == (FEW + background, background)
    assert run.plan.total_steps == 80 * (FEW + background) // 8  # as often as before, and those
    assert run.plan.lr(run.plan.total_steps) < 0.02 * run.plan.peak_lr


def test_background_is_off_in_presets_and_where_it_is_set() -> None:
    for values in ({"preset": "stable-r34"}, {"background": 0.0}, {"overfit": 4}):
        run = finalize(train_settings(**values), None, SINGLE_PROCESS, FEW, background=50)
        assert run.plan.background == 0
    chosen = train_settings(preset="stable-r34", background=0.2)
    assert finalize(chosen, None, SINGLE_PROCESS, FEW, background=50).plan.background == 25
    limited = train_settings(limit_train=8)
    assert finalize(limited, None, SINGLE_PROCESS, FEW, background=25).plan.background == 2
    with pytest.raises(UsageError, match="--background"):
        finalize(chosen, None, SINGLE_PROCESS, FEW, background=0)


@pytest.mark.parametrize(
    ("images", "total", "warmup"),
    [(9, 1000, 50), (100, 1000, 50), (300, 1012, 50), (2000, 5000, 250)],
)
def test_few_images_get_enough_steps(images: int, total: int, warmup: int) -> None:
    plan, tuned = plan_of(train_settings(), images), plan_of(train_settings(init="x.pt"), images)
    assert (plan.total_steps, plan.warmup_steps) == (total, warmup)
    assert plan.global_batch_size == 8
    assert plan.peak_lr == pytest.approx(1.4e-3)
    assert plan.lr(total) < 0.02 * plan.peak_lr  # the cosine ends with the run
    assert tuned.total_steps == max(3000, 10 * images) // 8
    assert tuned.peak_lr < 0.8 * plan.peak_lr


@pytest.mark.parametrize(("world_size", "is_frozen"), [(1, False), (2, True)])
def test_small_batches_keep_the_statistics_of_batch_norm(world_size: int, is_frozen: bool) -> None:
    train = adapt_to_data(train_settings(init="x.pt"), 100, world_size)[0].config.train
    assert train.freeze_norm == is_frozen


@pytest.mark.parametrize("images", [5_000, 117_266])
@pytest.mark.parametrize("values", [{}, {"init": "x.pt"}])
def test_many_images_keep_the_recipe(images: int, values: dict[str, object]) -> None:
    resolved = train_settings(**values)
    assert adapt_to_data(resolved, images, 1) == (resolved, None)
    plan = plan_of(resolved, images)
    assert plan.total_steps == 65 * images // 32
    assert plan.warmup_steps == 5 * images // 32
    assert plan.peak_lr == 2.5e-3


@pytest.mark.parametrize("preset", ["stable-r34", "mlperf-r34", "nvidia-r50"])
def test_a_named_preset_is_used_as_it_is(preset: str) -> None:
    resolved = train_settings(preset=preset)
    assert adapt_to_data(resolved, 100, 1) == (resolved, None)


def test_values_of_the_user_win() -> None:
    chosen = {"epochs": 3, "warmup": "2st", "batch_size": 5, "eval_every": "7st"}
    adapted, rule = adapt_to_data(train_settings(**chosen), 100, 1)
    assert {k: getattr(adapted.config.train, k) for k in chosen} == chosen
    assert adapted.config.train.decay_epochs[-1] == 3
    assert rule is not None
    assert not any(f" {name} " in rule for name in chosen)
    assert "adamw" in rule


@pytest.mark.parametrize(
    "choice", [{"lr": 1e-3}, {"optimizer": "sgd"}, {"weight_decay": 1e-4}, {"momentum": 0.8}]
)
def test_an_explicit_rate_keeps_the_optimizer_of_the_preset(choice: dict[str, object]) -> None:
    train = adapt_to_data(train_settings(**choice), 100, 1)[0].config.train
    preset = train_settings(**choice).config.train
    for name in ("optimizer", "lr", "weight_decay", "momentum"):
        assert getattr(train, name) == getattr(preset, name)


@pytest.mark.parametrize("steps", [1, 20, 61, 998, 3000])
@pytest.mark.parametrize("images", [7, 100, 333])
def test_other_steps_than_the_rule_takes_rescale_its_schedule(steps: int, images: int) -> None:
    plan, full = plan_of(train_settings(steps=steps), images), plan_of(train_settings(), images)
    assert plan.total_steps == plan.decay_steps[-1] == steps
    assert plan.warmup_steps == max(steps // 20, 1)
    assert plan.lr(steps) == pytest.approx(full.lr(full.total_steps))


def test_a_warmup_that_nobody_chose_is_a_tenth_of_a_short_run_and_written() -> None:
    for steps, warmup in ((50, "5st"), (5, "1st")):
        run = finalize(train_settings(steps=steps), None, SINGLE_PROCESS, MANY)
        assert run.config.train.warmup == warmup
        assert run.resolved.sources["train.warmup"].kind is Kind.RULE
    named = finalize(train_settings(preset="nvidia-r50", epochs=1), None, SINGLE_PROCESS, FEW)
    assert named.config.train.warmup == "1st"  # the whole recipe has 3 steps


@pytest.mark.parametrize("preset", get_args(PresetName))
@pytest.mark.parametrize("values", [{}, {"warmup": "2.619685"}, {"epochs": 30}])
def test_steps_end_a_named_preset_without_changing_it(
    preset: str, values: dict[str, object]
) -> None:
    whole = plan_of(train_settings(preset=preset, **values), MANY, 8)
    for steps in (1, 100, 5000):
        part = plan_of(train_settings(preset=preset, steps=steps, **values), MANY, 8)
        assert part == whole._replace(total_steps=min(steps, whole.total_steps))


@pytest.mark.parametrize("images", [FEW, MANY])
def test_a_continued_run_keeps_the_schedule_that_was_fitted_to_its_first_steps(images: int) -> None:
    first = finalize(train_settings(steps=50), None, SINGLE_PROCESS, images)

    def longer(**values: object) -> TrainSchedule:
        settings = train_settings(steps=900, **values)
        return finalize(settings, None, SINGLE_PROCESS, images, before=first.config).plan

    assert longer() == first.plan._replace(total_steps=900)
    assert longer(warmup="7st").warmup_steps == 7
    assert longer(resume_changed=True) == plan_of(train_settings(steps=900), images)


def test_the_plan_names_the_rule(cli: Cli, shapes: Path) -> None:
    plan = ["train", "--data", shapes, "--dry-run"]
    recipe = json.loads(cli(*plan, "--json").out)["recipe"]
    assert "small-data rule" in recipe
    assert "adamw" in recipe
    named = json.loads(cli(*plan, "--json", "--preset", "stable-r34").out)
    assert named["recipe"] == "preset stable-r34"
    assert "small-data rule" in " ".join(cli(*plan).out.split())


@pytest.mark.parametrize(
    ("preset", "missed"), [("stable-r34", "157,576 and 197,886"), ("habana-tf-r34", "50,387")]
)
def test_a_dry_run_warns_of_decays_that_are_not_reached(cli: Cli, preset: str, missed: str) -> None:
    command = ["train", "--preset", preset, "--fake-data", "--device", "cpu", "--dry-run"]
    assert "warning" not in cli(*command).err
    result = cli(*command, "--epochs", 10)
    assert (result.code, missed in result.err) == (0, True)


def test_weights_of_another_backbone_are_refused_at_once(cli: Cli) -> None:
    result = cli("train", "--preset", "mlperf-r34", "--backbone", "resnet50", "--data", "none")
    assert result.code == 2
    assert all(word in result.err for word in ("model.weights", "resnet34-333f7ec4", "resnet50"))
