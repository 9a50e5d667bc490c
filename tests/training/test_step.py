"""One step: a bad one moves nothing, accumulation equals the larger batch."""

from __future__ import annotations

import pytest
import torch
from tiny_network import batch, config, everything

from ssdctl.device import open_device
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import NonFiniteError
from ssdctl.input import Batch
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.optimizer import build_optimizer, clip_factor
from ssdctl.training.step import (
    MAX_CONSECUTIVE,
    MAX_ROLLBACKS,
    BadStep,
    NonFiniteGuard,
    TrainStep,
    build_step,
)

SINGLE_PROCESS = Ranks(0, 1, 0)
CPU = open_device("cpu")


def build_training(**changes: object) -> tuple[SSD300, torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    settings = config(**changes)
    model = SSD300("tiny", 4, "none").train()
    step = build_step(model, settings, CPU, "fp32")
    return model, step.optimizer, step


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 10.0])
def test_a_bad_step_changes_nothing_and_training_continues(
    optimizer_name: str, clip: float
) -> None:
    model, optimizer, step = build_training(optimizer=optimizer_name, clip_grad=clip)
    step([batch(1)], 1e-3)
    before = {name: tensor.clone() for name, tensor in everything(model, optimizer).items()}
    bad = step([batch(1, jitter=float("inf"))], 1e-3)
    assert bad.read(SINGLE_PROCESS)["is_bad"] == 1
    for name, tensor in everything(model, optimizer).items():  # batch norm's statistics too
        assert torch.equal(tensor, before[name]), name
    good = step([batch(1, seed=2)], 1e-3)
    assert good.read(SINGLE_PROCESS)["is_bad"] == 0
    assert not torch.equal(model.box_heads[0].weight, before["box_heads.0.weight"])


def test_accumulation_equals_the_larger_batch() -> None:
    """Batch norm sees other batches, so it is frozen; the rest is a mean of means."""
    full_batch = batch(2)
    halves = [Batch(*(field[i : i + 1] for field in full_batch[:4]), rows=None) for i in (0, 1)]  # type: ignore[arg-type]
    ends = []
    for batches in ([full_batch], halves):
        model, _, step = build_training(clip_grad=0)
        model.freeze_norm()
        step(batches, 1e-2)
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_bounds_the_update() -> None:
    model, _, step = build_training(clip_grad=0.5, momentum=0, weight_decay=0)
    before = [p.detach().clone() for p in model.parameters()]
    result = step([batch(1)], 1.0).read(SINGLE_PROCESS)
    assert result["grad_norm"] > 0.5
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)


def test_biases_and_norms_are_not_decayed_by_default() -> None:
    model, optimizer, _ = build_training()
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 5e-4
    assert others["weight_decay"] == 0
    assert all(p.dim() > 1 for p in decayed["params"])
    assert all(p.dim() == 1 for p in others["params"])
    (everything,) = build_optimizer(
        model, config(decay_bias=True, decay_norm=True), CPU
    ).param_groups
    assert len(everything["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(("bias", "norm"), [(True, False), (False, True)])
def test_decay_of_biases_and_of_batch_norm_are_two_switches(bias: bool, norm: bool) -> None:
    model, _, _ = build_training()
    groups = build_optimizer(model, config(decay_bias=bias, decay_norm=norm), CPU).param_groups
    decayed = {id(p) for p in groups[0]["params"]}
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert norms
    for layer in norms:
        assert (id(layer.weight) in decayed) is (id(layer.bias) in decayed) is norm
    for layer in convolutions:
        assert id(layer.weight) in decayed
        assert layer.bias is None or (id(layer.bias) in decayed) is bias


def flags(guard: NonFiniteGuard, *bad: bool) -> list[int]:
    for number, is_bad in enumerate(bad, start=1):
        guard.watch(number, torch.tensor(float(is_bad)), [number * 10])
    return [entry.step for entry in guard.check()]


def test_guard_names_bad_steps_once() -> None:
    guard = NonFiniteGuard("skip")
    assert flags(guard, False, True, True, False) == [2, 3]
    assert guard.check() == []
    assert not guard.should_roll_back([BadStep(2, [20])], "folder")
    with pytest.raises(NonFiniteError, match="step 4"):  # the policy `stop`: at the first one
        NonFiniteGuard("stop").should_roll_back([BadStep(4, [1])], "folder")


def test_guard_raises_only_after_many_consecutive_bad_steps() -> None:
    guard = NonFiniteGuard("skip")
    flags(guard, *[True, False] * MAX_CONSECUTIVE)
    guard.should_roll_back([BadStep(1, [1])], "folder")
    for _ in range(2):
        flags(guard, *[True] * (MAX_CONSECUTIVE // 2))
    with pytest.raises(NonFiniteError, match="folder"):
        guard.should_roll_back([BadStep(1, [1])], "folder")


def test_guard_bounds_rollbacks() -> None:
    guard = NonFiniteGuard("rollback")
    for _ in range(MAX_ROLLBACKS):
        assert guard.should_roll_back([BadStep(1, [1])], "folder")
    with pytest.raises(NonFiniteError):
        guard.should_roll_back([BadStep(1, [1])], "folder")


def test_the_factor_of_clipping() -> None:
    factors = clip_factor(torch.tensor([0.0, 2.0, 8.0, torch.nan]), 4.0).tolist()
    assert factors == pytest.approx([1, 1, 0.5, 1], rel=1e-6)
    assert clip_factor(torch.zeros(()), 1e-9) < 0.01  # the norm is never divided by alone


def test_frozen_stem_keeps_its_weights_and_moves_its_statistics() -> None:
    torch.manual_seed(0)
    settings = config(freeze_stem=True, weight_decay=0.1)
    model = SSD300("tiny", 4, "none").train()
    model.freeze_stem()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = build_step(model, settings, CPU, "fp32")
    step([batch(2)], 1e-2)
    same = {n for n, t in model.state_dict().items() if torch.equal(t, before[n])}
    frozen = {"backbone.conv1.weight", "backbone.bn1.weight", "backbone.layer1.0.conv1.weight"}
    assert frozen <= same
    assert "backbone.bn1.running_mean" not in same
    assert "backbone.layer1.1.conv1.weight" not in same
    assert "backbone.layer1.0.conv2.weight" not in same


def test_frozen_stages_neither_train_nor_use_the_statistics_of_the_batch() -> None:
    model = SSD300("tiny", 4, "none").train()
    model.freeze(2)
    parameters = model.backbone.named_parameters()
    frozen = {name.partition(".")[0] for name, p in parameters if not p.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}
    assert not model.backbone.bn1.training
    assert model.backbone.layer2.training


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
def test_a_bad_first_step_leaves_no_trace(optimizer_name: str) -> None:
    """The step after it is the one that a fresh run would have taken."""
    ends = []
    for batches in ([batch(1, jitter=float("inf")), batch(1)], [batch(1)]):
        model, _, step = build_training(optimizer=optimizer_name)
        for entry in batches:
            result = step([entry], 1e-3)
        assert result.read(SINGLE_PROCESS)["is_bad"] == 0
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=0, msg=name)
