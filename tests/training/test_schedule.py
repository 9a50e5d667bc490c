"""From durations to steps, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import TINY_RUN, Result
from hypothesis import given
from hypothesis import strategies as st
from tiny_network import config

from ssdctl.config import resolve
from ssdctl.errors import UsageError
from ssdctl.training.schedule import (
    Every,
    TrainSchedule,
    checkpoint_bytes,
    every,
    make_plan,
    next_evaluation,
    split_duration,
)

COCO = 117_266


def test_mlperf_at_eight_times_128() -> None:
    plan = make_plan(config(preset="mlperf-r34"), COCO, world_size=8)
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


def test_nvidia_warms_up_in_steps() -> None:
    plan = make_plan(config(preset="nvidia-r50"), COCO, world_size=1)
    assert plan.warmup_steps == 300
    assert plan.peak_lr == 2.6e-3
    assert plan.lr(150) == pytest.approx(2.6e-3 / 2)


def test_habana_tf_is_a_cosine() -> None:
    plan = make_plan(config(preset="habana-tf-r34"), COCO, world_size=1)
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


@pytest.mark.parametrize(
    ("world", "bs", "accumulate", "steps"), [(1, 32, 1, 3664), (8, 128, 1, 114), (2, 8, 4, 1832)]
)
def test_global_batch_counts_ranks_and_accumulation(
    world: int, bs: int, accumulate: int, steps: int
) -> None:
    plan = make_plan(config(batch_size=bs, accumulate=accumulate), COCO, world)
    assert plan.global_batch_size == world * bs * accumulate
    assert plan.steps_per_epoch == steps
    assert plan.total_steps == int(65 * COCO / plan.global_batch_size)
    assert plan.epoch(plan.total_steps) == pytest.approx(65, abs=0.02)


def test_an_epoch_has_at_least_one_step() -> None:
    plan = make_plan(config(batch_size=32, warmup="0"), images=5, world_size=1)
    assert (plan.steps_per_epoch, plan.total_steps) == (1, 65 * 5 // 32)


def test_warmup_longer_than_the_recipe_is_refused() -> None:
    with pytest.raises(UsageError, match=r"18322") as caught:
        make_plan(config(epochs=1), COCO, 1)
    assert "st" in (caught.value.hint or "")


def test_durations() -> None:
    plan = make_plan(config(batch_size=32), COCO, 1)
    assert split_duration("3") == split_duration("3ep") == (3.0, "ep")
    assert due("2", plan, 15_000) == [int(2 * COCO / 32), int(4 * COCO / 32)]
    assert due("0.5ep", plan, 2000) == [1832]
    assert due("300st", plan, 700) == [300, 600]
    assert due("0.00001ep", plan, 3) == [1, 2, 3]
    assert every("10min", plan) == Every(None, 600.0)
    assert due("10min", plan, 1000) == []


@given(
    images=st.integers(1, 500),
    batch_size=st.integers(1, 64),
    epochs=st.sampled_from(["1", "0.3ep", "7", "1.1"]),
)
def test_epoch_periods_end_with_their_epochs(images: int, batch_size: int, epochs: str) -> None:
    plan = make_plan(config(batch_size=batch_size, warmup="0st"), images, 1)
    period = Fraction(epochs.removesuffix("ep")) * images / batch_size
    ends = {int(n * period) for n in range(1, 202)} if period >= 1 else set(range(1, 201))
    assert due(epochs, plan, 200) == sorted(step for step in ends if step <= 200)


def due(text: str, plan: TrainSchedule, last: int) -> list[int]:
    return [step for step in range(1, last + 1) if every(text, plan).is_due(step)]


@pytest.mark.slow(in_ci=True)
def test_size_of_a_checkpoint(shapes: Path, tmp_path: Path, cli: Callable[..., Result]) -> None:
    run = ["--out", tmp_path / "run", *TINY_RUN.split()]
    command = ["train", "--data", shapes, *run]
    assert cli(*command, "--steps", 1, "--eval-every", "9ep").code == 0
    size = (tmp_path / "run/checkpoints/last.pt").stat().st_size
    config = resolve(environment={"HOME": "/"}).config.train
    guess = checkpoint_bytes("tiny", 6, config)
    assert 0.99 * guess < size < 1.05 * guess


@given(images=st.integers(1, 200), batch=st.integers(1, 300), step=st.integers(0, 50))
def test_an_epoch_ends_with_the_step_that_its_images_fill(
    images: int, batch: int, step: int
) -> None:
    plan = make_plan(config(batch_size=batch, warmup="0st", epochs=1000), images, world_size=1)
    epoch = 1
    while max(epoch * images // batch, 1) <= step:
        epoch += 1
    assert plan.epochs_ended(step) == epoch - 1


def test_the_last_epoch_ends_with_the_last_step() -> None:
    plan = make_plan(config(batch_size=4, epochs=3, warmup="0st"), 95, world_size=1)
    assert plan.total_steps == 71  # rounded down from 71.25
    assert (plan.epochs_ended(70), plan.epochs_ended(71)) == (2, 3)


def test_the_next_evaluation() -> None:
    options = config(preset="nvidia-r50", batch_size=128)
    plan = make_plan(options, COCO, world_size=8)
    assert next_evaluation(options, plan, 0) == int(22 * COCO / 1024)
    assert next_evaluation(options, plan, int(22 * COCO / 1024)) == int(32 * COCO / 1024)
    options = config(preset="mlperf-r34")
    plan = make_plan(options, COCO, world_size=8)
    assert next_evaluation(options, plan, 600) == int(10 * COCO / 1024)
    assert next_evaluation(options, plan, plan.total_steps - 1) == plan.total_steps
