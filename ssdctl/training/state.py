"""The state of a run: its moving average, batch norm's statistics of each rank, a checkpoint's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.checkpoint.file import check_shapes, load_state
from ssdctl.checkpoint.format import Checkpoint, compare_shapes
from ssdctl.distributed import Ranks, collectives
from ssdctl.errors import IntegrityError

log = logging.getLogger(__name__)


class EMA:
    """An exponential moving average of the weights and batch norm's statistics, on their device.

    Args:
        model: The network; the average starts from its weights.
        decay: The weight of the old average at each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        live = model.state_dict(keep_vars=True)  # the tensors themselves, changed in place
        self._state = {k: v.detach().clone() for k, v in live.items()}
        self._floats = [k for k, v in self._state.items() if v.is_floating_point()]
        self._averages = [self._state[k] for k in self._floats]
        self._sources = [live[k] for k in self._floats]

    def update(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._sources, 1 - self._decay)

    def buffers(self) -> list[Tensor]:
        """Return the average of batch norm's statistics, which differs between ranks."""
        names = dict(self._model.named_buffers())
        return [self._state[name] for name in self._floats if name in names]

    def state(self) -> Mapping[str, Tensor]:
        live = self._model.state_dict()
        return {**live, **{k: self._state[k] for k in self._floats}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name in self._floats:
            self._state[name].copy_(state[name])

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the average as the network's weights for the duration of the block."""
        trained = [tensor.detach().clone() for tensor in self._sources]
        try:
            _copy(self._sources, self._averages)
            yield
        finally:
            _copy(self._sources, trained)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        torch._foreach_copy_(targets, sources)


class RankStatistics:
    """Batch norm's statistics of this rank, which differ between ranks until they are averaged."""

    def __init__(self, model: nn.Module, ema: EMA | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._own = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        self._num_of_model = len(self._own)
        self._own += [] if ema is None else ema.buffers()
        self._averaged_step: int | None = None

    def average(self, step: int) -> None:
        """Average them over the ranks, once after a step."""
        if self._averaged_step != step:
            collectives.average_buffers(self._own, self._ranks)
            self._averaged_step = step

    @contextlib.contextmanager
    def averaged(self, step: int) -> Iterator[list[list[Tensor]] | None]:
        """Average them for the block only; yield those of each rank, on the first rank."""
        if self._ranks.is_single_process or self._averaged_step == step:
            yield None
            return
        own = [buffer.detach().to("cpu", copy=True) for buffer in self._own]
        of_ranks = collectives.gather_to_first(own, self._ranks)
        self.average(step)
        yield of_ranks
        self._load(own)

    def load(self, of_ranks: Sequence[Sequence[Tensor]] | None, step: int) -> None:
        """Load the statistics that this rank saved if the world size is the same.

        Otherwise all ranks have the checkpoint's average at `step`: averaging it again would
        round it. An EMA that begins here keeps it, too.
        """
        self._averaged_step = step
        if of_ranks is None or len(of_ranks) != self._ranks.world_size:
            return
        own = of_ranks[self._ranks.rank]
        pairs = list(zip(self._own, own, strict=False))
        if len(pairs) < self._num_of_model or any(b.shape != v.shape for b, v in pairs):
            raise IntegrityError("the checkpoint has statistics of batch norm of another network")
        self._load(own)

    def _load(self, own: Sequence[Tensor]) -> None:
        self._averaged_step = None
        for buffer, value in zip(self._own, own, strict=False):
            buffer.copy_(value)


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint
) -> dict[str, Tensor] | None:
    """Load a checkpoint into network and optimizer; return the EMA's weights, if any."""
    trained = checkpoint.model if checkpoint.trained is None else checkpoint.trained
    load_state(model, trained, checkpoint.path)
    if checkpoint.trained is not None:
        check_shapes(model, checkpoint.model, checkpoint.path)
    kind = "adamw" if is_adamw(optimizer) else "sgd"
    sizes, saved_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, checkpoint.optimizer["param_groups"])
    )
    if kind == checkpoint.config.get("train.optimizer") and sizes == saved_sizes:
        load_optimizer(optimizer, dict(checkpoint.optimizer), checkpoint.path)
    else:
        log.warning("the optimizer differs from the checkpoint's: its momentum is reset")
    return None if checkpoint.trained is None else checkpoint.model


def is_adamw(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is AdamW, by its state: a vendor's class need not be PyTorch's."""
    return any("exp_avg" in state for state in optimizer.state.values())


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], path: Path) -> None:
    """Load a state dict, which is untrusted, saved on any device and in any memory layout.

    The settings of this optimizer are kept: the saved ones belong to another device's kernels
    (`fused`, `capturable`) and to its schedule. State tensors get the memory layout of their
    weights, which the fused kernels require.

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
            key, is_tensor = f"optimizer.{number}.{name}", isinstance(value, Tensor)
            if name == "step":
                fits = value.numel() == 1 if is_tensor else isinstance(value, int | float)
            else:
                fits = value.is_floating_point() if is_tensor else value is None
            if not fits:
                raise IntegrityError(f"{path}: {key} is not a floating-point tensor")
            if name != "step" and is_tensor:
                shapes[key] = tuple(value.shape)
    if shapes:
        compare_shapes(expected, shapes, path)
