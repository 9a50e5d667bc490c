"""Dynamic loss scaling for fp16, in which small gradients would underflow to zero.

The scale is a tensor on the device and part of the optimizer's state, so checkpoints contain it. A
scale that is too high makes gradients infinite: that step is skipped and the scale halved. This is
the normal way to find the scale; a step counts as bad only if the loss itself is not finite, or the
scale is at its minimum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ssdctl.device.base import Device

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
GROWTH_STEPS = 2000  # good steps after which the scale doubles


class LossScale:
    """The scale of one run."""

    def __init__(self, device: Device) -> None:
        self.scale = torch.full((), INITIAL_SCALE, device=device.torch_device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device.torch_device)

    def explains(self, loss: Tensor) -> Tensor:
        """Return whether a too high scale can be the reason of a step's infinite gradients."""
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
