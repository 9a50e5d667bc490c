"""Build the device's fastest SGD or AdamW, and skip steps without waiting for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.config import TrainConfig
from ssdctl.device.base import Device
from ssdctl.train import light_optimizer

SMALLEST_LR = 1e-30


def build_optimizer(model: nn.Module, config: TrainConfig, device: Device) -> torch.optim.Optimizer:
    """The recipe's optimizer. Its learning rate is set at every step."""
    light_optimizer.avoid_dynamo_import()
    trained = [p for p in model.parameters() if p.requires_grad]
    exempt = _exempt_from_decay(model, config)
    decayed = [p for p in trained if id(p) not in exempt]
    others = [p for p in trained if id(p) in exempt]
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


def _exempt_from_decay(model: nn.Module, config: TrainConfig) -> set[int]:
    """Return the ids of the parameters without weight decay.

    The vectors among the parameters are biases of convolutions, or scales and biases of a
    normalisation.
    """
    exempt = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_bias = name == "bias" and isinstance(module, (nn.Conv2d, nn.Linear))
            is_decayed = config.decay_bias if is_bias else config.decay_norm
            if parameter.dim() == 1 and not is_decayed:
                exempt.add(id(parameter))
    return exempt


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


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """By its state: a vendor's AdamW need not be PyTorch's."""
    return any("exp_avg" in state for state in optimizer.state.values())


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what `state_dict` gave, on whatever device and in whatever memory layout.

    The settings stay this optimizer's own: the other's belong to another device's kernels (`fused`,
    `capturable`) and to its schedule. The fused kernels walk through a weight and its momentum side
    by side, as they lie in memory.
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**own, "params": theirs["params"]} for own, theirs in pairs]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)
