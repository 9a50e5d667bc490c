"""Build the device's fastest SGD or AdamW, and skip steps without waiting for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ssdctl.device.base import Device
from ssdctl.training import light_optimizer

if TYPE_CHECKING:
    from ssdctl.config import TrainConfig

SMALLEST_LR = 1e-30


def build_optimizer(model: nn.Module, config: TrainConfig, device: Device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. Its learning rate is set at every step."""
    decayed, others = decay_groups(
        model, decay_bias=config.decay_bias, decay_norm=config.decay_norm
    )
    trained = [*decayed, *others]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # An optimizer makes its state at the first step, some of uninitialised memory that the kernel
    # fills; a first step that is left out would leave it so. Zeros give the same first step.
    if config.optimizer == "adamw":
        optimizer = device.adamw(groups, config.lr, (config.momentum, 0.999))
        for parameter in trained:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        return optimizer
    optimizer = device.sgd(groups, config.lr, config.momentum)
    if config.momentum:
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def decay_groups(
    model: nn.Module, *, decay_bias: bool, decay_norm: bool
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trained parameters with weight decay, and those without, in the network's order.

    The vectors among the parameters are biases of convolutions, or scales and biases of a
    normalisation.
    """
    exempt = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" and isinstance(module, (nn.Conv2d, nn.Linear))
            is_decayed = decay_bias if is_bias else decay_norm
            if parameter.dim() == 1 and not is_decayed:
                exempt.add(id(parameter))
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if id(p) not in exempt]
    return decayed, [p for p in trained if id(p) in exempt]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            # A warm-up starts at 0, which lazy devices would compile as a constant.
            group["lr"].fill_(max(lr, SMALLEST_LR))
        else:
            group["lr"] = lr


def update(optimizer: torch.optim.Optimizer, is_skipped: Tensor, scale: Tensor | None) -> None:
    """Take a step with fused kernels, unless the flag on the device is set. Does not wait.

    Args:
        optimizer: From `build_optimizer`, on a device with `supports_found_inf`.
        is_skipped: A scalar: 1.0 leaves weights and state unchanged.
        scale: The factor by which the gradients are too large; None is 1.
    """
    # The fused kernels read these on the device, as for GradScaler; torch's stubs lack them.
    optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    light_optimizer.step(optimizer)
