"""Exponential moving average of the weights, which often scores better than the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class EMA:
    """Averages a network's weights and batch norm's statistics, on its device.

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
        """Update the average after a step. Does not wait for the device."""
        with torch.no_grad():
            torch._foreach_lerp_(self._averages, self._sources, 1 - self._decay)

    def buffers(self) -> list[Tensor]:
        """Return the average of batch norm's statistics, which differs between ranks."""
        names = dict(self._model.named_buffers())
        return [self._state[name] for name in self._floats if name in names]

    def state(self) -> Mapping[str, Tensor]:
        """Return the average as a state dict of the network."""
        live = self._model.state_dict()
        return {**live, **{k: self._state[k] for k in self._floats}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a saved average."""
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
