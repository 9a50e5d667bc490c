"""The loss on the validation pictures, from the network's outputs that detection uses too.

It is the training loss without augmentation and in evaluation mode: if it rises while the training
loss falls, the network overfits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ssdctl.device.base import Device
from ssdctl.inference.detector import Output
from ssdctl.input.loader import Batch
from ssdctl.model.constants import constants_of_model
from ssdctl.model.loss import Losses, MultiboxLoss


class ValidationLoss:
    """Adds up the losses of pictures; does not wait for the device.

    Args:
        model: The network.
        device: The device of its outputs.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        loss = MultiboxLoss(constants=constants_of_model(model))
        self._loss = loss.to(device.torch_device)
        self._device = device
        self._sums = torch.zeros(len(Losses._fields), device=device.torch_device)
        self._count = 0

    def add(self, output: Output, batch: Batch) -> None:
        """Add the losses of a batch; pictures without boxes do not count, as in training.

        Args:
            output: Of the batch, and of further pictures that fill it up.
            batch: Has the ground truth of each of its pictures.
        """
        size, count = len(output.offsets), len(batch.rows)
        boxes = F.pad(batch.boxes[:count], (0, 0, 0, 0, 0, size - count))
        labels = F.pad(batch.labels[:count], (0, 0, 0, size - count))
        with torch.no_grad():
            place = self._device.torch_device
            losses = self._loss(*output, boxes.to(place), labels.to(place))
            self._sums += size * torch.stack(list(losses)).to(self._sums.dtype)
        self._count += int((labels > 0).any(dim=1).sum())

    def sums(self) -> list[float]:
        """Return the sums of the three losses, and the number of pictures with boxes."""
        return [*self._sums.tolist(), float(self._count)]


def mean_losses(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the means over the pictures of all ranks; -1 if no picture has a box."""
    total, box, classification, count = (sum(column) for column in zip(*sums, strict=True))
    if not count:
        return {"loss": -1.0, "loss_box": -1.0, "loss_class": -1.0}
    return {
        "loss": total / count,
        "loss_box": box / count,
        "loss_class": classification / count,
    }
