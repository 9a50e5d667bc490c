"""A run is planned once: what the user left open follows from device, data and checkpoint.

So do the rules for few images and for fine-tuning, all lengths in steps, and the learning rate.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
from conftest import Cli
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.config import Config, resolve
from ssdctl.config.fields import DEVICE_TYPES, PresetName, Tiling
from ssdctl.config.resolve import Override, of_call
from ssdctl.config.settings import Kind
from ssdctl.data.open_dataset import DatasetSize
from ssdctl.distributed import Ranks
from ssdctl.errors import UsageError
from ssdctl.training.plan import Every, Network, Plan, make_plan, split_duration, with_network

FEW, COCO = 100, 117_266


def settings(**values: object) -> Config:
    overrides = [Override(key.replace("__", "."), v, of_call("--x")) for key, v in values.items()]
    return resolve(overrides=overrides, environment={}, default_file=False)


def train_settings(**values: object) -> Config:
    return settings(**{f"train__{key}": value for key, value in values.items()})


def plan_of(
    config: Config,
    images: int = COCO,
    world_size: int = 1,
    *,
    device: Any = None,
    background: int | None = None,
    **known: Any,
) -> Plan:
    size = DatasetSize(images, background, 0, [])
    return make_plan(config, device, Ranks(0, world_size, 0), size, **known)


def recipe(images: int = COCO, world_size: int = 1, **values: object) -> Plan:
    """The plan of settings that no rule replaces."""
    return Plan(train_settings(**values), Path("run"), images, world_size)


def test_the_rule_for_few_images_uses_the_measured_batch() -> None:
    auto = settings(train__batch_size="auto")
    plan = plan_of(auto, FEW, largest_batch=512)
    assert plan == plan_of(settings(train__batch_size=512), FEW)
    assert plan.batch_size == plan.config.train.batch_size == 512
    assert plan.base_lr == pytest.approx(2e-3)
    with pytest.raises(UsageError, match="--bs auto"):
        plan_of(auto, FEW, device=DEVICE_TYPES["cuda"])


def test_the_network_of_init_replaces_only_what_is_open() -> None:
    network = Network("resnet50", "batch")

    def backbone(**values: object) -> str:
        config = settings(train__init="a.pt", **values)
        return with_network(config, network).model.backbone

    assert backbone() == backbone(model__backbone="resnet50") == "resnet50"
    assert backbone(train__preset="nvidia-r50", model__extra_norm="batch") == "resnet50"
    for other in (
        {"model__backbone": "resnet18"},
        {"model__extra_norm": "none"},
        {"train__preset": "stable-r34"},
    ):
        with pytest.raises(UsageError, match=r"resnet50|batch"):
            backbone(**other)
    config = with_network(settings(train__init="a.pt"), network._replace(tiling=Tiling(224, 0.1)))
    other = with_network(config, network)  # as of the config file of a run with another --init
    assert (config.data.tile, config.data.tile_overlap, other.data.tile) == (224, 0.1, None)


@pytest.mark.parametrize("kind", [Kind.FILE, Kind.ENVIRONMENT, Kind.CALL])
def test_a_chosen_precision_is_refused_and_a_presets_replaced(kind: Kind) -> None:
    cpu = DEVICE_TYPES["cpu"]
    preset = settings(train__preset="nvidia-r50")
    plan = plan_of(preset, device=cpu)
    assert plan.precision != "fp16"
    (notice,) = plan.notices
    assert "fp16" in notice
    source = preset.sources["train.precision"]._replace(kind=kind)
    with pytest.raises(UsageError, match="fp16"):
        plan_of(preset.with_value("train.precision", "fp16", source), device=cpu)


@pytest.mark.parametrize(
    ("option", "idle", "used"),
    [
        ({"train__hue_degrees": 9.0}, {"train__augment": "flip,crop"}, {"train__augment": "color"}),
        ({"train__background_negatives": 5}, {}, {"train__background": 0.1}),
        ({"train__patience": 2}, {"train__fake_data": True}, {}),
        ({"train__augment": "flip"}, {"train__overfit": 4}, {"train__limit_train": 4}),
        ({"train__overlap_gradients": True}, {"train__execution": "eager"}, {}),
        ({"model__weights": "imagenet"}, {"train__init": "a.pt"}, {}),
        (
            {"train__upload_checkpoints": True},
            {"train__tensorboard": True},
            {"train__tracker": ("wandb",)},
        ),
    ],
)
def test_an_option_without_an_effect_is_refused(
    option: dict[str, object], idle: dict[str, object], used: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match="does nothing"):
        plan_of(settings(**option, **idle), background=COCO)
    plan_of(settings(**option, **used), background=COCO)
    plan_of(settings(**idle))


def test_batch_norm_of_a_single_image_is_refused() -> None:
    norm = {"model__extra_norm": "batch"}
    with pytest.raises(UsageError, match="--bs 1"):
        plan_of(settings(train__batch_size=1, **norm))
    for world_size, values in (
        (1, {"train__batch_size": 2, **norm}),
        (1, {"train__batch_size": 1}),
        (2, {"train__batch_size": 1, "train__sync_bn": True, **norm}),
    ):
        plan = plan_of(settings(**values), world_size=world_size)
        assert plan.batch_size == values["train__batch_size"]
    assert plan_of(settings(**norm), FEW, 16).batch_size == 2


def test_limits_and_ranks_are_part_of_the_plan() -> None:
    assert plan_of(train_settings(overfit=3, limit_train=5), FEW, 2).images == 3
    for world_size, global_batch in ((2, 8), (4, 8), (16, 16)):
        assert plan_of(settings(), FEW, world_size).global_batch_size == global_batch


@pytest.mark.parametrize(("empty", "background"), [(0, 0), (25, 25), (100, 100), (900, 100)])
def test_the_rule_for_few_images_takes_at_most_half_empty(empty: int, background: int) -> None:
    plan = plan_of(settings(), FEW, background=empty)
    assert (plan.images, plan.background) == (FEW + background, background)
    assert plan.total_steps == 80 * (FEW + background) // 8  # as often as before, and those
    assert plan.lr(plan.total_steps) < 0.02 * plan.peak_lr


def test_background_is_off_in_presets_and_where_it_is_set() -> None:
    for values in ({"preset": "stable-r34"}, {"background": 0.0}, {"overfit": 4}):
        assert plan_of(train_settings(**values), FEW, background=50).background == 0
    chosen = train_settings(preset="stable-r34", background=0.2)
    assert plan_of(chosen, FEW, background=50).background == 25
    tiny = train_settings(preset="stable-r34", background=0.001)
    assert plan_of(tiny, FEW, background=50).background == 1
    limited = train_settings(limit_train=8)
    assert plan_of(limited, FEW, background=25).background == 2
    with pytest.raises(UsageError, match="--background"):
        plan_of(chosen, FEW, background=0)


@pytest.mark.parametrize(
    ("images", "total", "warmup"),
    [(9, 1000, 50), (100, 1000, 50), (300, 1012, 50), (2000, 5000, 250)],
)
def test_few_images_get_enough_steps(images: int, total: int, warmup: int) -> None:
    plan, tuned = plan_of(train_settings(), images), plan_of(train_settings(init="x.pt"), images)
    assert (plan.total_steps, plan.warmup_steps) == (total, warmup)
    assert (plan.global_batch_size, len(plan.evaluations_after(0))) == (8, 10)
    assert plan.base_lr == pytest.approx(1.4e-3)
    assert plan.lr(total) < 0.02 * plan.peak_lr  # the cosine ends with the run
    assert tuned.total_steps == max(3000, 10 * images) // 8
    assert tuned.base_lr < 0.8 * plan.base_lr


@pytest.mark.parametrize(("world_size", "is_frozen"), [(1, False), (2, True)])
def test_small_batches_keep_the_statistics_of_batch_norm(world_size: int, is_frozen: bool) -> None:
    train = plan_of(train_settings(init="x.pt"), 100, world_size).config.train
    assert train.freeze_norm == is_frozen


def test_values_of_the_user_win() -> None:
    assert plan_of(train_settings(eval_at=(1,)), 100).config.train.eval_every is not None
    chosen = {"epochs": 3, "warmup": "2st", "batch_size": 5, "eval_every": "7st"}
    plan = plan_of(train_settings(**chosen), 100)
    assert {k: getattr(plan.config.train, k) for k in chosen} == chosen
    assert plan.config.train.decay_epochs[-1] == 3
    assert plan.rule is not None
    assert not any(f" {name} " in plan.rule for name in chosen)
    assert "adamw" in plan.rule


@pytest.mark.parametrize(
    "choice", [{"lr": 1e-3}, {"optimizer": "sgd"}, {"weight_decay": 1e-4}, {"momentum": 0.8}]
)
def test_an_explicit_rate_keeps_the_optimizer_of_the_preset(choice: dict[str, object]) -> None:
    train, preset = (
        plan_of(train_settings(**choice), 100).config.train,
        train_settings(**choice).train,
    )
    for name in ("optimizer", "lr", "weight_decay", "momentum"):
        assert getattr(train, name) == getattr(preset, name)


@pytest.mark.parametrize("steps", [1, 20, 61, 998, 3000])
@pytest.mark.parametrize("images", [7, 100, 333])
def test_other_steps_than_the_rule_takes_rescale_its_schedule(steps: int, images: int) -> None:
    plan, full = plan_of(train_settings(steps=steps), images), plan_of(train_settings(), images)
    assert plan.total_steps == plan.decay_steps[-1] == steps
    assert plan.warmup_steps == min(max(steps // 20, 1), steps - 1)
    assert plan.lr(steps) == pytest.approx(full.lr(full.total_steps))
    assert len(plan.evaluations_after(0)) == min(max(steps // 50, 1), 10)


def test_a_warmup_that_nobody_chose_is_a_tenth_of_a_short_run_and_written() -> None:
    for steps, warmup in ((50, "5st"), (5, "1st"), (1, "0st")):
        config = plan_of(train_settings(steps=steps)).config
        assert config.train.warmup == warmup
        assert config.sources["train.warmup"].kind is Kind.RULE
    named = plan_of(train_settings(preset="nvidia-r50", epochs=1), FEW)
    assert named.config.train.warmup == "1st"  # the whole recipe has 3 steps
    decayed = plan_of(train_settings(preset="torchvision-vgg16"), 289)
    assert (decayed.total_steps, decayed.decay_steps[0], decayed.warmup_steps) == (1083, 722, 72)


@pytest.mark.parametrize("preset", get_args(PresetName))
@pytest.mark.parametrize("values", [{}, {"warmup": "2.619685"}, {"epochs": 30}])
def test_steps_end_a_preset_without_changing_it(preset: str, values: dict[str, object]) -> None:
    whole = plan_of(train_settings(preset=preset, **values), world_size=8)
    for steps in (1, 100, 5000):
        part = plan_of(train_settings(preset=preset, steps=steps, **values), world_size=8)
        total = min(steps, whole.total_steps)
        assert part.as_json() == {**whole.as_json(), "total_steps": total}


@pytest.mark.parametrize("images", [FEW, COCO])
def test_a_continued_run_keeps_the_schedule_that_was_fitted_to_its_first_steps(images: int) -> None:
    first = plan_of(train_settings(steps=50), images)

    def longer(**values: object) -> Plan:
        return plan_of(train_settings(steps=900, **values), images, before=first.config)

    assert longer().as_json() == {**first.as_json(), "total_steps": 900}
    assert longer(warmup="7st").warmup_steps == 7

    def precision_after(precision: str) -> str:
        run = first.config.with_value("train.precision", precision)
        return plan_of(train_settings(), images, device=DEVICE_TYPES["cpu"], before=run).precision

    assert [precision_after("bf16"), precision_after("fp32")] == ["bf16", "fp32"]
    with pytest.raises(UsageError, match="trains in fp16, which device cpu lacks"):
        precision_after("fp16")
    new = plan_of(train_settings(steps=900), images)
    assert longer(resume_changed=True).as_json() == new.as_json()


@pytest.mark.parametrize(
    ("preset", "missed"), [("stable-r34", "157,576 and 197,886"), ("habana-tf-r34", "50,387")]
)
def test_a_dry_run_warns_of_decays_that_are_not_reached(cli: Cli, preset: str, missed: str) -> None:
    command = ["train", "--preset", preset, "--fake-data", "--device", "cpu", "--dry-run"]
    assert "warning" not in cli(*command).err
    cli(*command, "--epochs", 10).expect(0, missed)
    cut = cli(*command, "--warmup", "58ep").expect(0, "but the learning rate decays from")
    assert "warning" not in cli(*command, *cut.err.split(": ")[-1].split()[:2]).err


def test_mlperf_at_eight_times_128() -> None:
    plan = recipe(world_size=8, preset="mlperf-r34")
    assert plan.warmup_steps == 299  # int(2.619685 * 117266 / 1024), truncated
    assert plan.peak_lr == pytest.approx(0.08)
    assert plan.steps_per_epoch == 114
    assert plan.decay_steps == (4580, 5725)
    assert plan.lr(0) == 0
    assert plan.lr(100) == pytest.approx(0.08 - (299 - 100) * 0.08 / 299)
    assert plan.lr(298) == pytest.approx(0.08 * 298 / 299)
    assert plan.lr(299) == 0.08
    assert plan.lr(4579) == 0.08
    assert plan.lr(4580) == pytest.approx(0.008)
    assert plan.lr(5725) == pytest.approx(0.0008)


def test_habana_tf_is_a_cosine() -> None:
    plan = recipe(preset="habana-tf-r34")
    per_epoch = COCO / 128
    base = 3e-3 * 4
    assert plan.lr(plan.warmup_steps // 2) == pytest.approx(1.01 * base / 2, rel=1e-3)
    last = (plan.warmup_steps - 1) / plan.warmup_steps
    assert plan.lr(plan.warmup_steps - 1) == pytest.approx(1.01 * base * last)
    assert plan.lr(int(7 * per_epoch) + 1) == pytest.approx(1.01 * base)
    assert plan.lr(int(15 * per_epoch)) == pytest.approx(1.01 * base)
    assert plan.lr(int(35 * per_epoch)) == pytest.approx(0.51 * base, rel=1e-3)
    assert plan.lr(int(55 * per_epoch) + 1) == pytest.approx(0.01 * base)
    assert plan.lr(plan.total_steps - 1) == pytest.approx(0.01 * base)


def test_warmup_longer_than_the_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"18322") as caught:
        plan_of(train_settings(epochs=1, warmup="18322st"))
    assert "st" in (caught.value.hint or "")
    assert plan_of(settings(train__warmup="66ep"), FEW).total_steps > 0  # of 65 before the rule


def test_durations() -> None:
    plan = recipe(batch_size=32)
    assert split_duration("3") == split_duration("3ep") == (3.0, "ep")
    assert due("0.5ep", plan, 2000) == [1832]
    assert due("300st", plan, 700) == [300, 600]
    assert due("0.00001ep", plan, 3) == [1, 2, 3]
    assert plan.every("10min") == Every(None, 600.0)
    assert due("10min", plan, 1000) == []
    exact = recipe(100, batch_size=1, epochs=5, warmup="2.3", decay_epochs=(1.1, 2.3))
    assert (exact.warmup_steps, exact.decay_steps) == (230, (110, 230))
    for option in ("warmup", "eval_every", "save_every"):
        with pytest.raises(UsageError, match=r"2\.9st"):
            train_settings(**{option: "2.9st"})


@given(
    images=st.integers(1, 500),
    batch_size=st.integers(1, 64),
    epochs=st.sampled_from(["1", "0.3ep", "7", "1.1"]),
)
def test_epoch_periods_end_with_their_epochs(images: int, batch_size: int, epochs: str) -> None:
    plan = recipe(images, batch_size=batch_size, warmup="0st")
    period = Fraction(epochs.removesuffix("ep")) * images / batch_size
    ends = {int(n * period) for n in range(1, 202)} if period >= 1 else set(range(1, 201))
    assert due(epochs, plan, 200) == sorted(step for step in ends if step <= 200)


def due(text: str, plan: Plan, last: int) -> list[int]:
    return [step for step in range(1, last + 1) if plan.every(text).is_due(step)]


@given(images=st.integers(1, 200), batch=st.integers(1, 300), step=st.integers(0, 50))
def test_an_epoch_ends_with_the_step_its_images_fill(images: int, batch: int, step: int) -> None:
    plan = recipe(images, batch_size=batch, warmup="0st", epochs=1000)
    epoch = 1
    while max(epoch * images // batch, 1) <= step:
        epoch += 1
    assert plan.epochs_ended(step) == epoch - 1


def test_the_next_evaluation() -> None:
    plan, first = recipe(world_size=8, preset="nvidia-r50", batch_size=128), int(22 * COCO / 1024)
    assert plan.next_evaluation(0) == first
    assert [plan.evaluates_at(step) for step in (first - 1, first)] == [False, True]
    assert plan.next_evaluation(first) == int(32 * COCO / 1024)
    plan = recipe(world_size=8, preset="mlperf-r34")
    assert plan.next_evaluation(600) == int(10 * COCO / 1024)
    assert plan.next_evaluation(plan.total_steps - 1) == plan.total_steps
    assert plan.evaluations_after(600)[-1] == plan.total_steps
