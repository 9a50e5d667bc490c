"""The device's fastest SGD or AdamW: skip steps without waiting, scale the loss for fp16.

Importing torch._dynamo takes 5 to 9 seconds of CPU time, and the methods of `torch.optim.Optimizer`
import it so that torch.compile leaves them out of a graph. An eager run has no graph, so they are
called without it. If PyTorch's internals differ, only the time changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdctl.device import Device
from ssdctl.runtime.system import Overridden

if TYPE_CHECKING:
    from ssdctl.config import TrainConfig


SMALLEST_LR = 1e-30
# Each is wrapped by torch._compile._disable_dynamo, which imports torch._dynamo unless the function
# has this attribute: its counterpart that the compiler leaves out.
_COMPILER_ENTRY = "__dynamo_disable"
_WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
GROWTH_STEPS = 2000  # good steps after which the scale doubles
EPSILON = 1e-6  # added to the norm of the gradients
OPTIONS = ("momentum", "weight_decay", "betas", "eps")


def build_optimizer(model: nn.Module, config: TrainConfig, device: Device) -> torch.optim.Optimizer:
    """Return the recipe's optimizer. Its learning rate is set at every step."""
    bias, norm = config.decay_bias, config.decay_norm
    decayed, others = decay_groups(model, decay_bias=bias, decay_norm=norm)
    trained = [*decayed, *others]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (others, 0.0))
        if parameters
    ]
    # An optimizer makes its state at the first step, some of uninitialized memory that the kernel
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
    normalization.
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
    _step(optimizer)


@functools.cache
def _compiler_entry(function: Any) -> Overridden[Any]:
    def write(value: Any) -> None:
        if value is not None:
            setattr(function, _COMPILER_ENTRY, value)
        elif hasattr(function, _COMPILER_ENTRY):
            delattr(function, _COMPILER_ENTRY)

    return Overridden(lambda: getattr(function, _COMPILER_ENTRY, None), write)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Let the optimizers' methods run as plain functions during the block.

    If torch._dynamo is imported already, nothing changes.
    """
    with contextlib.ExitStack() as stack:
        for name in () if _is_dynamo_imported() else _WRAPPED_METHODS:
            function = inspect.unwrap(getattr(torch.optim.Optimizer, name))
            entry = getattr(function, _COMPILER_ENTRY, function)
            stack.enter_context(_compiler_entry(function).by(entry))
        yield


def _step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, by the undecorated method if torch._dynamo is not imported.

    The decorators set the gradient mode, name the step for profilers, break the compiler's graph
    and run step hooks. Optimizers of vendors keep their decorators.
    """
    if _is_dynamo_imported() or not type(optimizer).__module__.startswith("torch.optim."):
        optimizer.step()
        return
    profile_name = f"Optimizer.step#{type(optimizer).__name__}.step"
    with torch.no_grad(), torch.autograd.profiler.record_function(profile_name):
        inspect.unwrap(type(optimizer).step)(optimizer)


def _is_dynamo_imported() -> bool:
    return "torch._dynamo" in sys.modules


class LossScale:
    """Dynamic loss scaling for fp16, in which small gradients would underflow to zero.

    The scale is a tensor on the device and part of the optimizer's state, so checkpoints contain
    it. A scale that is too high makes gradients infinite: that step is skipped and the scale
    halved. This is the normal way to find the scale; a step counts as bad only if the loss itself
    is not finite, or the scale is at its minimum.
    """

    def __init__(self, device: Device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device.torch_device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device.torch_device)

    def explains(self, loss: Tensor) -> Tensor:
        """Return whether the gradients may have overflowed because of the scale."""
        return torch.isfinite(loss) & (self.scale > MIN_SCALE)

    def adapt(self, is_skipped: Tensor) -> None:
        """Halve the scale after a skipped step, double it after GROWTH_STEPS others."""
        torch._amp_update_scale_(self.scale, self._good_steps, is_skipped, 2.0, 0.5, GROWTH_STEPS)
        self.scale.clamp_(min=MIN_SCALE)

    def attach_to(self, optimizer: torch.optim.Optimizer) -> None:
        """Become part of the optimizer's state: saved, loaded and rolled back with it."""

        def save(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "loss_scale": [self.scale, self._good_steps]}

        def load(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            if "loss_scale" in state:  # absent if the saved run had another precision
                scale, good_steps = state["loss_scale"]
                self.scale.copy_(scale)
                self._good_steps.copy_(good_steps)

        optimizer.register_state_dict_post_hook(save)
        optimizer.register_load_state_dict_pre_hook(load)


class Group(NamedTuple):
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Tensor]]
    lr: Tensor | float  # a tensor if steps are compiled, which would compile each value of a float
    options: dict[str, Any]


def groups_of(optimizer: torch.optim.Optimizer) -> list[Group]:
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
