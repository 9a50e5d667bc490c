"""A file of `export --format nvidia` is loaded by the statements of NVIDIA's `main.py --checkpoint`:
the network, `torch.optim.SGD` with two parameter groups, and `MultiStepLR`; training continues."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from conftest import Cli
from torch import Tensor
from torch.optim.lr_scheduler import MultiStepLR

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
BASE_LR, MOMENTUM, WEIGHT_DECAY = 2.6e-3, 0.9, 5e-4
BATCH = 2
TRAIN = [
    "train", "--preset", "nvidia-r50", "--backbone", "tiny", "--backbone-weights", "none",
    "--fp32", "--device", "cpu", "--bs", BATCH, "--workers", 1, "--limit-train", 4,
    "--epochs", 6, "--warmup", "1st", "--decay-epochs", "2,4", "--steps", 5, "--out", "run",
]  # fmt: skip


class NvidiaSSD300:
    """NVIDIA's network by its parameters, in the order of its modules."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        parts = ("feature_extractor.", "additional_blocks.", "loc.", "conf.")
        self.parameters = {
            name: torch.nn.Parameter(tensor.clone())
            for part in parts
            for name, tensor in state.items()
            if name.startswith(part) and not name.endswith(STATISTICS)
        }
        statistics = {name for name in state if name.endswith(STATISTICS)}
        assert statistics | set(self.parameters) == set(state)
        self.network = reference.Network({**state, **self.parameters}, "nvidia", training=True)


def opened(path: Path) -> tuple[NvidiaSSD300, torch.optim.SGD, MultiStepLR, dict[str, Any]]:
    """Do what main.py does with `--checkpoint`, in training and in evaluation."""
    checkpoint = torch.load(path)
    model = NvidiaSSD300(checkpoint["model"])
    named = model.parameters.items()
    vectors = [p for name, p in named if p.dim() == 1 or name.endswith(".bias")]
    others = [p for name, p in named if not (p.dim() == 1 or name.endswith(".bias"))]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=BASE_LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    scheduler = MultiStepLR(optimizer=optimizer, milestones=[43, 54], gamma=0.1)
    scheduler.load_state_dict(checkpoint["scheduler"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return model, optimizer, scheduler, checkpoint


@pytest.fixture
def exported(cli: Cli, shapes: Path) -> Callable[..., Path]:
    def train_and_export(*options: object) -> Path:
        trained = cli(*TRAIN, "--data", shapes, *options)
        assert trained.code == 0, trained.err
        result = cli("export", "run", "--format", "nvidia", "--out", "epoch_1.pt")
        assert result.code == 0, result.err
        return Path("epoch_1.pt")

    return train_and_export


def test_their_program_continues_the_run(exported: Callable[..., Path]) -> None:
    model, optimizer, scheduler, checkpoint = opened(exported())
    ours = torch.load("run/checkpoints/last.pt", weights_only=True)
    assert checkpoint["epoch"] == 2  # 2 steps each: the third was begun
    assert checkpoint["iteration"] == 5
    peak = BASE_LR * BATCH / 32
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([peak / 10] * 2)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, WEIGHT_DECAY]
    assert [g["momentum"] for g in optimizer.param_groups] == [MOMENTUM] * 2

    expected = momenta_by_name(ours)
    for name, parameter in model.parameters.items():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(momentum, expected.pop(our_name(name)), msg=name)
    assert not expected

    rates = []
    for _ in range(checkpoint["epoch"], 6):  # the epochs that are left
        boxes, scores = model.network(torch.rand(2, 3, 300, 300))
        (boxes.square().mean() + scores.logsumexp(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[1]["lr"])
    assert rates == pytest.approx([peak / 10, peak / 100, peak / 100, peak / 100])
    assert all(p.isfinite().all() for p in model.parameters.values())


def momenta_by_name(payload: dict[str, Any]) -> dict[str, Tensor]:
    """Return the momenta of a checkpoint of ssdctl: first those of parameters with weight decay."""
    weights = {k: v for k, v in payload["model"].items() if not k.endswith(STATISTICS)}
    names = [k for k, v in weights.items() if v.dim() > 1]
    names += [k for k, v in weights.items() if v.dim() == 1]
    states = payload["optimizer"]["state"]
    return {name: states[index]["momentum_buffer"] for index, name in enumerate(names)}


def our_name(name: str) -> str:
    trunk = ["conv1", "bn1", "", "", "layer1", "layer2", "layer3"]
    if name.startswith("feature_extractor."):
        _, _, number, rest = name.split(".", 3)
        return f"backbone.{trunk[int(number)]}.{rest}"
    for theirs, ours in (("additional_blocks", "extra"), ("loc", "box_heads")):
        name = name.replace(f"{theirs}.", f"{ours}.")
    return re.sub(r"^conf\.", "class_heads.", name)


@pytest.mark.slow(in_ci=True)
@pytest.mark.parametrize("options", [["--freeze-stem"], ["--ema", 0.9], ["--optimizer", "adamw"]])
def test_states_without_all_momenta_load(
    exported: Callable[..., Path], options: list[object]
) -> None:
    model, optimizer, _, _ = opened(exported(*options))
    first = model.parameters["feature_extractor.feature_extractor.0.weight"]
    assert "momentum_buffer" not in optimizer.state.get(first, {})
    last = model.parameters["conf.5.bias"]
    assert ("momentum_buffer" in optimizer.state.get(last, {})) == (options == ["--freeze-stem"])
    for parameter in model.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_what_does_not_fit_nvidias_program(exported: Callable[..., Path], cli: Cli) -> None:
    exported()
    result = cli("export", "run", "--format", "nvidia", "--out", "again.pt")
    assert "81" in result.err  # other classes than COCO's
    result = cli("export", "run", "--format", "mlperf", "--out", "x.pt")
    assert result.code == 2
    assert "--format nvidia" in result.err
    assert "--extra-norm none" in result.err
    payload = torch.load("run/checkpoints/last.pt", weights_only=True)
    payload["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    torch.save(payload, "other.pt")
    result = cli("export", "other.pt", "--format", "nvidia", "--out", "x.pt")
    assert result.code == 5
    assert "conv1" in result.err
    assert not Path("x.pt").exists()
