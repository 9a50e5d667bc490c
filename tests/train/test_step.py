"""One step: a bad one moves nothing, accumulation equals the larger batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ssdctl.config import TrainConfig, resolve
from ssdctl.config.resolve import Override
from ssdctl.device import open_device
from ssdctl.errors import NonFiniteError
from ssdctl.input.loader import Batch
from ssdctl.model.ssd300 import SSD300
from ssdctl.train.guard import MOST_IN_A_ROW, Guard
from ssdctl.train.optimizer import build_optimizer
from ssdctl.train.step import TrainStep


def config(**changes: object) -> TrainConfig:
    overrides = [Override(f"train.{k}", v, "test") for k, v in changes.items()]
    return resolve(overrides=overrides, environment={"HOME": "/"}).config.train


def batch(size: int, seed: int = 0, *, jitter: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(size, 3, 2, generator=generator) * 0.5
    boxes = torch.cat([low, low + 0.1 + 0.4 * torch.rand(size, 3, 2, generator=generator)], dim=-1)
    labels = torch.randint(1, 4, (size, 3), generator=generator)
    labels[:, 2] = 0
    colours = torch.tensor([[jitter, 1.0, 1.0, 0.0]]).expand(size, 4)
    images = torch.randint(0, 256, (size, 300, 300, 3), dtype=torch.uint8, generator=generator)
    return Batch(images, boxes, labels, colours, rows=None)  # type: ignore[arg-type]


def made(**changes: object) -> tuple[SSD300, torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    settings = config(**changes)
    model = SSD300("resnet18", 4, "none").train()
    optimizer = build_optimizer(model, settings)
    return model, optimizer, TrainStep(model, optimizer, open_device("cpu"), settings, "fp32")


def freeze_batch_norm(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.0, 10.0])
def test_a_bad_step_moves_nothing_and_training_goes_on(optimizer_name: str, clip: float) -> None:
    model, optimizer, step = made(optimizer=optimizer_name, clip_grad=clip)
    freeze_batch_norm(model)
    step([batch(1)], 1e-3)
    before = [p.clone() for p in model.parameters()]
    momenta = [
        v.clone()
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, torch.Tensor)
    ]
    bad = step([batch(1, jitter=float("inf"))], 1e-3)
    assert bad.read()["is_bad"] == 1
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    after = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, momenta, strict=True))
    good = step([batch(1, seed=2)], 1e-3)
    assert good.read()["is_bad"] == 0
    assert not torch.equal(model.box_heads[0].weight, before[0])


def test_accumulation_equals_the_larger_batch() -> None:
    """Batch norm sees other batches, so it is frozen; the rest is a mean of means."""
    whole = batch(2)
    halves = [Batch(*(field[i : i + 1] for field in whole[:4]), rows=None) for i in (0, 1)]  # type: ignore[arg-type]
    ends = []
    for batches in ([whole], halves):
        model, _, step = made(clip_grad=0)
        freeze_batch_norm(model)
        step(batches, 1e-2)
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_bounds_the_update() -> None:
    model, _, step = made(clip_grad=0.5, momentum=0, weight_decay=0)
    before = [p.detach().clone() for p in model.parameters()]
    result = step([batch(1)], 1.0).read()
    assert result["grad_norm"] > 0.5
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)


def test_biases_and_norms_are_not_decayed_unless_asked() -> None:
    model, optimizer, _ = made()
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 5e-4
    assert others["weight_decay"] == 0
    assert all(p.dim() > 1 for p in decayed["params"])
    assert all(p.dim() == 1 for p in others["params"])
    (everything,) = build_optimizer(model, config(decay_bias_and_norm=True)).param_groups
    assert len(everything["params"]) == len(list(model.parameters()))


class _Result:
    def __init__(self, is_bad: bool) -> None:
        self.is_bad = torch.tensor(float(is_bad))


def test_guard_counts_skips_and_gives_up() -> None:
    guard = Guard("skip", torch.device("cpu"))
    for is_bad in (False, True, True, False):
        guard.watch(_Result(is_bad))  # type: ignore[arg-type]
    assert guard.check(4) == 2
    assert guard.check(4) == 0
    for _ in range(MOST_IN_A_ROW):
        guard.watch(_Result(True))  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError):
        guard.check(99)


def test_guard_stops_at_the_first_where_told() -> None:
    guard = Guard("stop", torch.device("cpu"))
    guard.watch(_Result(True))  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError, match="1 steps up to step 1"):
        guard.check(1)
