"""A file of `export --format nvidia` has the weights of NVIDIA's network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from conftest import Cli
from torch import Tensor

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
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


@pytest.fixture
def exported(cli: Cli, shapes: Path) -> Callable[..., Path]:
    def train_and_export(*options: object) -> Path:
        trained = cli(*TRAIN, "--data", shapes, *options)
        assert trained.code == 0, trained.err
        result = cli("export", "run", "--format", "nvidia", "--out", "epoch_1.pt")
        assert result.code == 0, result.err
        return Path("epoch_1.pt")

    return train_and_export


def test_their_network_takes_the_weights(exported: Callable[..., Path]) -> None:
    checkpoint = torch.load(exported())
    assert set(checkpoint) == {"model", "label_map"}
    model = NvidiaSSD300(checkpoint["model"])
    boxes, scores = model.network(torch.rand(2, 3, 300, 300))
    (boxes.square().mean() + scores.logsumexp(1).mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters.values())


def test_what_does_not_fit_nvidias_program(exported: Callable[..., Path], cli: Cli) -> None:
    exported()
    result = cli("export", "run", "--format", "nvidia", "--out", "again.pt")
    assert "81" in result.err  # other classes than COCO's
    result = cli("export", "run", "--format", "mlperf", "--out", "x.pt")
    assert result.code == 2
    assert "--format nvidia" in result.err
    assert "--extra-norm none" in result.err
