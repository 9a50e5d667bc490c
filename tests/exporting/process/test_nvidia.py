"""A file of `export --format nvidia` is loaded by the statements of NVIDIA's `main.py --checkpoint`:
the network, `torch.optim.SGD` with two parameter groups, and `MultiStepLR`; training continues."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Cli
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torchvision.models.resnet import BasicBlock

DIVISOR = 8  # ResNet-18's channels by this: the backbone `tiny`
CLASSES = 6  # the shapes dataset's with background; 81 in NVIDIA's program
BASE_LR, MOMENTUM, WEIGHT_DECAY = 2.6e-3, 0.9, 5e-4
BATCH = 2
TRAIN = [
    "train", "--preset", "nvidia-r50", "--backbone", "tiny", "--backbone-weights", "none",
    "--fp32", "--device", "cpu", "--bs", BATCH, "--workers", 1, "--limit-train", 4,
    "--epochs", 6, "--warmup", "1st", "--decay-epochs", "2,4", "--steps", 5, "--out", "run",
]  # fmt: skip


def block(inputs: int, width: int, stride: int) -> BasicBlock:
    if inputs == width:
        return BasicBlock(inputs, width, stride)
    projection = nn.Conv2d(inputs, width, 1, stride, bias=False)
    return BasicBlock(inputs, width, stride, nn.Sequential(projection, nn.BatchNorm2d(width)))


class Trunk(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.feature_extractor = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Sequential(block(width, width, 1), block(width, width, 1)),
            nn.Sequential(block(width, 2 * width, 2), block(2 * width, 2 * width, 1)),
            nn.Sequential(block(2 * width, 4 * width, 1), block(4 * width, 4 * width, 1)),
        )


class NvidiaSSD300(nn.Module):
    """NVIDIA's network on ResNet-18 by its names and the order of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        d = DIVISOR
        self.feature_extractor = Trunk(64 // d)
        channels = [256 // d, 512 // d, 512 // d, 256 // d, 256 // d, 128 // d]
        widths = [256 // d, 256 // d, 128 // d, 128 // d, 128 // d]
        self.additional_blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels[i], widths[i], 1, bias=False),
                nn.BatchNorm2d(widths[i]),
                nn.ReLU(),
                nn.Conv2d(widths[i], channels[i + 1], 3, 2 if i < 3 else 1, int(i < 3), bias=False),
                nn.BatchNorm2d(channels[i + 1]),
                nn.ReLU(),
            )
            for i in range(5)
        )
        shapes = list(zip(channels, (4, 6, 6, 6, 4, 4), strict=True))
        self.loc = nn.ModuleList(nn.Conv2d(c, n * 4, 3, padding=1) for c, n in shapes)
        self.conf = nn.ModuleList(nn.Conv2d(c, n * CLASSES, 3, padding=1) for c, n in shapes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = [self.feature_extractor.feature_extractor(images)]
        for block in self.additional_blocks:
            maps.append(block(maps[-1]))
        n = len(images)
        boxes = [head(x).reshape(n, 4, -1) for head, x in zip(self.loc, maps, strict=True)]
        scores = [head(x).reshape(n, CLASSES, -1) for head, x in zip(self.conf, maps, strict=True)]
        return torch.cat(boxes, 2), torch.cat(scores, 2)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return NVIDIA's parameter groups: vectors without weight decay, then everything else."""
    named = list(model.named_parameters())
    vectors = [p for name, p in named if p.dim() == 1 or name.endswith(".bias")]
    others = [p for name, p in named if not (p.dim() == 1 or name.endswith(".bias"))]
    return [{"params": vectors, "weight_decay": 0.0}, {"params": others}]


def opened(path: Path) -> tuple[NvidiaSSD300, torch.optim.SGD, MultiStepLR, dict[str, Any]]:
    """Do what main.py does with `--checkpoint`, in training and in evaluation."""
    model = NvidiaSSD300()
    optimizer = torch.optim.SGD(
        two_groups(model), lr=BASE_LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    scheduler = MultiStepLR(optimizer=optimizer, milestones=[43, 54], gamma=0.1)
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
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
    for name, parameter in model.named_parameters():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(momentum, expected.pop(our_name(name)), msg=name)
    assert not expected

    model.eval()
    with torch.no_grad():
        boxes, scores = model(torch.rand(1, 3, 300, 300))
    assert boxes.shape == (1, 4, 8732)
    assert scores.shape == (1, CLASSES, 8732)
    rates = []
    for _ in range(checkpoint["epoch"], 6):  # the epochs that are left
        model.train()
        boxes, scores = model(torch.rand(2, 3, 300, 300))
        (boxes.square().mean() + scores.logsumexp(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[1]["lr"])
    assert rates == pytest.approx([peak / 10, peak / 100, peak / 100, peak / 100])
    assert all(p.isfinite().all() for p in model.parameters())


def momenta_by_name(payload: dict[str, Any]) -> dict[str, Tensor]:
    """Return the momenta of a checkpoint of ssdctl: first those of parameters with weight decay."""
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    weights = {k: v for k, v in payload["model"].items() if not k.endswith(statistics)}
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
    first = model.feature_extractor.feature_extractor[0].weight
    assert "momentum_buffer" not in optimizer.state.get(first, {})
    last = model.conf[5].bias
    assert ("momentum_buffer" in optimizer.state.get(last, {})) == (options == ["--freeze-stem"])
    for parameter in model.parameters():
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
