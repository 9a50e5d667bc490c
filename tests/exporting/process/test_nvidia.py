"""A file of `export --format nvidia` is loaded by the statements of NVIDIA's `main.py --checkpoint`:
the network, `torch.optim.SGD` with two parameter groups, and `MultiStepLR`."""

from __future__ import annotations

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


def test_their_program_loads_the_weights(exported: Callable[..., Path]) -> None:
    """In evaluation, too, it loads fresh states; training from the file starts at epoch 0."""
    model, optimizer, scheduler, checkpoint = opened(exported())
    assert (checkpoint["epoch"], checkpoint["iteration"], scheduler.last_epoch) == (0, 0, 0)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0, WEIGHT_DECAY]
    boxes, scores = model.network(torch.rand(2, 3, 300, 300))
    (boxes.square().mean() + scores.logsumexp(1).mean()).backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters.values())


def test_what_does_not_fit_nvidias_program(exported: Callable[..., Path], cli: Cli) -> None:
    exported()
    result = cli("export", "run", "--format", "nvidia", "--out", "again.pt")
    assert "81" in result.err  # other classes than COCO's
    result = cli("export", "run", "--format", "mlperf", "--out", "x.pt")
    assert result.code == 2
    assert "--format nvidia" in result.err
    assert "--extra-norm none" in result.err
