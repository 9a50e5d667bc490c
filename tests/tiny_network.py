"""A very small network with SSD300's output shapes, and training steps on it, for tests of devices,
optimizers and steps."""

from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.boxes import NUM_BOXES
from ssdctl.config import Config, TrainConfig, resolve
from ssdctl.config.resolve import Override, of_call
from ssdctl.device import Device
from ssdctl.distributed import SINGLE_PROCESS, Ranks
from ssdctl.input.batch import Batch
from ssdctl.training.step import TrainStep, build_step

NUM_CLASSES = 4


class Tiny(nn.Module):
    """(B, 3, 300, 300) images -> (B, 4, 8732) offsets and (B, 4, 8732) logits."""

    def __init__(self, *, has_norm: bool = True) -> None:
        super().__init__()
        # Without a bias: before a batch norm its gradient is rounding noise, which AdamW scales up.
        self.stem = nn.Conv2d(3, 8, 3, stride=8, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8) if has_norm else nn.Identity()
        self.heads = nn.Conv2d(8, (4 + NUM_CLASSES) * 7, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.heads(self.norm(self.stem(images)).relu()).flatten(1)
        outputs = outputs.unflatten(1, (4 + NUM_CLASSES, -1))[..., :NUM_BOXES]
        return outputs[:, :4], outputs[:, 4:]


def settings(**changes: object) -> Config:
    """Return a config with some settings of `train`, whatever files and variables there are."""
    overrides = [Override(f"train.{k}", v, of_call("test")) for k, v in changes.items()]
    return resolve(overrides=overrides, environment={}, default_file=False)


def config(**changes: object) -> TrainConfig:
    return settings(**changes).train


def batch(size: int = 2, seed: int = 0, *, jitter: float = 1.0) -> Batch:
    """Return random images with two boxes and a padding box each; an infinite jitter gives NaNs."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.rand(size, 3, 2, generator=generator) * 0.5
    boxes = torch.cat([low, low + 0.1 + 0.4 * torch.rand(size, 3, 2, generator=generator)], dim=-1)
    labels = torch.randint(1, NUM_CLASSES, (size, 3), generator=generator)
    labels[:, 2] = 0
    colors = torch.tensor([[jitter, 1.0, 1.0, 0.1]]).expand(size, 4).contiguous()
    images = torch.randint(0, 256, (size, 300, 300, 3), dtype=torch.uint8, generator=generator)
    return Batch(images, boxes, labels, colors, rows=None)  # type: ignore[arg-type]


def build_training(
    device: Device,
    precision: str = "fp32",
    *,
    ranks: Ranks = SINGLE_PROCESS,
    has_norm: bool = True,
    **changes: Any,
) -> tuple[Tiny, torch.optim.Optimizer, TrainStep]:
    """Return a model, its optimizer and its step, with the same weights in every call."""
    torch.manual_seed(0)
    model = device.place(Tiny(has_norm=has_norm)).train()
    step = build_step(model, config(**changes), device, precision, ranks)
    return model, step.optimizer, step


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all that a step changes, on the host."""
    state = {n: t.cpu() for n, t in model.state_dict().items() if "num_batches" not in n}
    for key, entry in optimizer.state_dict()["state"].items():
        state |= {f"{key}.{n}": v.cpu() for n, v in entry.items()}
    return state


def losses(step: TrainStep, steps: int = 4, lr: float = 1e-3, *, first: int = 0) -> list[float]:
    """Return the losses of some steps on different images, read only after the last step."""
    results = [step([batch(seed=n)], lr * n) for n in range(first, first + steps)]
    return [float(result.losses.total) for result in results]
