"""Load a checkpoint into the network and the optimizer of a run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.checkpoint.reader import Checkpoint, check_shapes, load_state
from ssdctl.checkpoint.validation import refuse_differences, shape_differences
from ssdctl.errors import IntegrityError
from ssdctl.training.schedule import TrainSchedule

log = logging.getLogger(__name__)


def step_of_plan(checkpoint: Checkpoint, plan: TrainSchedule) -> int:
    """Return the step of a checkpoint; with another global batch, that with as many samples."""
    if checkpoint.global_batch == plan.global_batch_size:
        return checkpoint.step
    return checkpoint.samples_seen // plan.global_batch_size


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> dict[str, Tensor] | None:
    """Load a checkpoint into network and optimizer; return the EMA's weights, if any.

    Raises:
        IntegrityError: They do not fit; the message lists what differs.
    """
    trained = checkpoint.model if checkpoint.trained is None else checkpoint.trained
    load_state(model, trained, checkpoint.path)
    if checkpoint.trained is not None:
        check_shapes(model, checkpoint.model, checkpoint.path)
    _load_optimizer(optimizer, checkpoint)
    return None if checkpoint.trained is None else checkpoint.model


def _load_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load the state of the checkpoint's optimizer, with this run's settings."""
    kind = "adamw" if is_adamw(optimizer) else "sgd"
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in checkpoint.optimizer["param_groups"]]
    if kind != checkpoint.config.get("train.optimizer") or sizes != saved_sizes:
        log.warning("the optimizer differs from the checkpoint's: its momentum is reset")
        return
    load_optimizer(optimizer, checkpoint.optimizer, checkpoint.path)


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is AdamW, by its state: a vendor's class need not be PyTorch's."""
    return any("exp_avg" in state for state in optimizer.state.values())


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Load a state dict that was saved on any device and in any memory layout.

    The settings of this optimizer are kept: the saved ones belong to another device's kernels
    (`fused`, `capturable`) and to its schedule. State tensors get the memory layout of their
    weights, which the fused kernels require.

    Args:
        optimizer: The optimizer, with as many groups and parameters as the saved one.
        state: The checkpoint's state dict, which is untrusted.
        path: The checkpoint, for messages.

    Raises:
        IntegrityError: The state does not fit; the fused kernels would write beyond its tensors.
    """
    _check_state(optimizer, state, path)
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = [{**own, "params": saved["params"]} for own, saved in pairs]
    optimizer.load_state_dict({**state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if name == "step":
                values[name] = torch.as_tensor(value, dtype=torch.float32).reshape(())
            elif isinstance(value, Tensor):
                values[name] = torch.empty_like(parameter).copy_(value)


def _check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Check that a saved state has a tensor of the parameter's shape for each of the optimizer's.

    A state without tensors is accepted: that of SGD without momentum.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if numbers != list(range(len(parameters))) or not set(state["state"]) <= set(numbers):
        raise IntegrityError(f"{path}: its optimizer does not number its parameters from 0")
    names = {name for values in optimizer.state.values() for name in values} - {"step"}
    names = names or {"momentum_buffer"}  # momentum that this run does not use
    expected = {
        f"optimizer.{number}.{name}": tuple(parameter.shape)
        for number, parameter in enumerate(parameters)
        for name in names
    }
    shapes = {}
    for number, values in state["state"].items():
        for name, value in values.items():
            place = f"optimizer.{number}.{name}"
            if name == "step":
                is_number = isinstance(value, int | float)
                fits = is_number or (isinstance(value, Tensor) and value.numel() == 1)
            else:
                fits = value is None or (isinstance(value, Tensor) and value.is_floating_point())
            if not fits:
                raise IntegrityError(f"{path}: {place} is not a tensor of fractions")
            if name != "step" and value is not None:
                shapes[place] = tuple(value.shape)
    if shapes:
        refuse_differences(shape_differences(expected, shapes), path)
