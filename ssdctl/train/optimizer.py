"""Build the device's fastest SGD or AdamW; update weights unless the step must be skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.config import TrainConfig
from ssdctl.device.base import Device
from ssdctl.train import light_optimizer

SMALLEST_LR = 1e-30


def build_optimizer(model: nn.Module, config: TrainConfig, device: Device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. `set_lr` sets its learning rate at every step."""
    light_optimizer.avoid_dynamo_import()
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if _is_decayed(p, config)]
    others = [p for p in trained if not _is_decayed(p, config)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # Optimizers create their state at the first step, some in uninitialised memory that the kernel
    # fills; if that step is skipped it stays uninitialised. Zeros give the same first step.
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


def _is_decayed(parameter: Tensor, config: TrainConfig) -> bool:
    """Return whether weight decay applies. Biases and batch norm's scales are vectors."""
    return config.decay_bias_and_norm or parameter.dim() > 1


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        # AdamW on lazy devices divides by the rate, which is 0 at the start of a warm-up.
        rate = max(lr, SMALLEST_LR) if group.get("capturable") else lr
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def update(
    optimizer: torch.optim.Optimizer, device: Device, is_skipped: Tensor, scale: Tensor | None
) -> None:
    """Take a step unless the flag on the device is set. Does not wait for the device.

    Args:
        optimizer: From `build_optimizer`.
        device: The optimizer's device.
        is_skipped: A scalar on the device: 1.0 leaves weights and state unchanged.
        scale: The factor of the gradients.
    """
    if device.supports_found_inf:
        # The fused kernels read these on the device, as with GradScaler; torch's stubs lack the
        # attributes.
        optimizer.found_inf = is_skipped  # type: ignore[attr-defined]
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
        light_optimizer.step(optimizer)
        return
    assert scale is None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [v for p in parameters for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    with torch.no_grad():
        before = [t.detach().clone() for t in (*parameters, *states)]
        light_optimizer.step(optimizer)
        for tensor, old in zip((*parameters, *states), before, strict=True):
            tensor.copy_(torch.where(is_skipped > 0, old, tensor))


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is AdamW, judged by its state: a vendor's class differs from PyTorch's."""
    return any("exp_avg" in state for state in optimizer.state.values())


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict` of any device and memory layout.

    The settings stay this optimizer's: the saved ones belong to another device's kernels (`fused`,
    `capturable`) and to its schedule. The fused kernels need a weight and its momentum in the same
    memory layout.
    """
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**own, "params": saved["params"]} for own, saved in pairs]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)
