"""The end of a step on devices whose optimizers cannot skip one: guard and update as one function.

In a skipped step the factor of momentum is 1 and that of a change is 0, so nothing is copied to be
restored. It is a pure function of tensors: a compiler makes one graph of it, where an optimizer
would launch several operations per parameter. Its results are those of PyTorch's SGD and AdamW.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

EPSILON = 1e-6  # added to the norm of the gradients
OPTIONS = ("momentum", "weight_decay", "betas", "eps")


class Group(NamedTuple):
    """A parameter group: its tensors and constants."""

    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Tensor]]
    lr: Tensor | float  # a tensor if steps are compiled, which would compile each value of a float
    options: dict[str, Any]


def groups_of(optimizer: torch.optim.Optimizer) -> list[Group]:
    """Return the parameter groups of an SGD or AdamW optimizer with their gradients and states."""
    groups = []
    for group in optimizer.param_groups:
        options = {name: group[name] for name in OPTIONS if name in group}
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        states = [dict(optimizer.state[p]) for p in parameters]
        groups.append(Group(parameters, gradients, states, group["lr"], options))
    return groups


def clip_factor(norm: Tensor, clip: float) -> Tensor:
    """Return the factor that limits the norm of the gradients to `clip`; a NaN gives 1."""
    return (clip / (norm + EPSILON)).clamp(max=1.0).nan_to_num(nan=1.0)


class GuardedUpdate(nn.Module):
    """Updates the parameters unless the loss or a gradient is not finite; a device can compile it.

    Args:
        clip: The largest norm of the gradients; 0 = any.
    """

    def __init__(self, clip: float) -> None:
        super().__init__()
        self._clip = clip

    @torch.no_grad()
    def forward(
        self, groups: list[Group], loss: Tensor, statistics: list[Tensor], before: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Update everything in place.

        Args:
            groups: The parameters with their gradients, averaged over the ranks.
            loss: A scalar, not finite on all ranks if it is not on one.
            statistics: The running statistics of batch norm, restored if the step is skipped.
            before: Their values before the step.

        Returns:
            The norm of the gradients before clipping, and 1.0 if the step is skipped.
        """
        norms = [torch.linalg.vector_norm(g) for group in groups for g in group.gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        is_skipped = ~(torch.isfinite(norm) & torch.isfinite(loss))
        factor = clip_factor(norm, self._clip) if self._clip else None
        for group in groups:
            update = _adamw if "betas" in group.options else _sgd
            update(group, factor, is_skipped)
        for tensor, old in zip(statistics, before, strict=True):
            tensor.copy_(torch.where(is_skipped, old, tensor))
        return norm, is_skipped.to(norm.dtype)


def _sgd(group: Group, factor: Tensor | None, is_skipped: Tensor) -> None:
    decay, momentum = group.options["weight_decay"], group.options["momentum"]
    lr = torch.where(is_skipped, 0.0, group.lr)
    kept = torch.where(is_skipped, 1.0, momentum)
    for p, gradient, state in zip(group.parameters, group.gradients, group.states, strict=True):
        change = gradient if factor is None else gradient * factor
        change = torch.where(is_skipped, 0.0, change + decay * p if decay else change)
        if momentum:
            change = state["momentum_buffer"].mul_(kept).add_(change)
        p.sub_(change * lr)


def _bias_correction(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta^count without cancellation, which costs two digits in fp32."""
    return -torch.expm1(count * math.log(beta)) if beta else torch.ones_like(count)


def _adamw(group: Group, factor: Tensor | None, is_skipped: Tensor) -> None:
    first, second = group.options["betas"]
    decay, epsilon = group.options["weight_decay"], group.options["eps"]
    first_weight = torch.where(is_skipped, 0.0, 1 - first)
    second_weight = torch.where(is_skipped, 0.0, 1 - second)
    for p, gradient, state in zip(group.parameters, group.gradients, group.states, strict=True):
        clean = gradient if factor is None else gradient * factor
        clean = torch.where(is_skipped, 0.0, clean)
        count = state["step"].add_(torch.where(is_skipped, 0.0, 1.0))
        mean = state["exp_avg"].lerp_(clean, first_weight)
        square = state["exp_avg_sq"].lerp_(clean.square(), second_weight)
        root = _bias_correction(second, count).sqrt()
        rate = group.lr * root / _bias_correction(first, count)
        new = p * (1 - group.lr * decay) - rate * mean / (square.sqrt() + epsilon * root)
        p.copy_(torch.where(is_skipped, p, new))
