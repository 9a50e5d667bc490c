"""SGD or AdamW, as fused kernels, which the guard can tell on the device to leave a step out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssdctl.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The recipe's optimizer. Its learning rate is set at every step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if _is_decayed(p, config)]
    others = [p for p in trained if not _is_decayed(p, config)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        betas = (config.momentum, 0.999)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    if config.momentum:
        # SGD makes its momentum at the first step, of uninitialised memory that the kernel fills;
        # a first step that is left out would leave it so. Zeros give the same first step.
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _is_decayed(parameter: Tensor, config: TrainConfig) -> bool:
    """Biases and the scales of batch norm are the vectors among the parameters."""
    return config.decay_bias_and_norm or parameter.dim() > 1


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
