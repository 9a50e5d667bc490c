"""Dynamic loss scaling for fp16: gradients too small for it are multiplied up before backward.

The scale lives on the device and travels in the optimizer's state, so checkpoints hold it. A scale
that was too high makes gradients infinite: that step is left out, the scale halved. Steps like that
are the ordinary way to find the scale, and no alarm; only where the loss itself is not finite, or
the scale has come to its floor, is a step bad.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdctl.device.base import Device

FIRST = 2.0**16
FLOOR = 1.0
GROWTH_STEPS = 2000  # good steps after which the scale doubles


class LossScale:
    """The scale of one run."""

    def __init__(self, device: Device) -> None:
        self.scale = torch.full((), FIRST, device=device.torch_device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device.torch_device)

    def is_ordinary(self, loss: Tensor) -> Tensor:
        """Whether a step whose gradients are infinite only shows that the scale is too high."""
        return torch.isfinite(loss) & (self.scale > FLOOR)

    def adapt(self, is_left_out: Tensor) -> None:
        """Halve the scale after a step that was left out, double it after many that were not."""
        torch._amp_update_scale_(self.scale, self._good_steps, is_left_out, 2.0, 0.5, GROWTH_STEPS)
        self.scale.clamp_(min=FLOOR)

    def travel_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Be part of the optimizer's state: saved, loaded and rolled back with it."""

        def put(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return {**state, "loss_scale": [self.scale, self._good_steps]}

        def take(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            if "loss_scale" in state:  # else of a run in another precision: it starts anew
                scale, good_steps = state["loss_scale"]
                self.scale.copy_(scale)
                self._good_steps.copy_(good_steps)

        optimizer.register_state_dict_post_hook(put)
        optimizer.register_load_state_dict_pre_hook(take)


def loss_scale(
    precision: str, device: Device, optimizer: torch.optim.Optimizer
) -> LossScale | None:
    """The scale that a precision needs, as part of the optimizer's state."""
    if precision != "fp16":
        return None
    scale = LossScale(device)
    scale.travel_with(optimizer)
    return scale
