"""The loss of uint8 images and their boxes: the part of a step that is compiled as one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ssdctl.device.base import Device
from ssdctl.model import fused
from ssdctl.model.augment import Normalise
from ssdctl.model.constants import constants_of_model
from ssdctl.model.loss import Losses, MultiboxLoss


class LossModule(nn.Module):
    """Colour, normalisation, network, targets and loss.

    Args:
        model: The network, on the device.
        device: Holds all of it.
        precision: Of the network; the rest computes in the precision of the weights.
    """

    def __init__(self, model: nn.Module, device: Device, precision: str) -> None:
        super().__init__()
        self._dtype = next(model.parameters()).dtype
        self.model = model
        constants = constants_of_model(model)
        self.normalise = Normalise(self._dtype, constants=constants).to(device.torch_device)
        self.loss = MultiboxLoss(self._dtype, constants=constants).to(device.torch_device)
        self._device = device
        self._precision = precision
        fused.swap_in(self, device.forms)

    def forward(
        self, images_BHW3: Tensor, jitter_B4: Tensor | None, boxes_BG4: Tensor, labels_BG: Tensor
    ) -> Tensor:
        """Return the fields of `Losses` as one tensor of three values."""
        pixels = self.normalise(images_BHW3, jitter_B4)
        with self._device.autocast(self._precision):
            offsets, logits = self.model(pixels)
        losses: Losses = self.loss(offsets, logits, boxes_BG4.to(self._dtype), labels_BG)
        return torch.stack(list(losses))
