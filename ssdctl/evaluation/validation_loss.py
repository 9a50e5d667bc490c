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
from ssdctl.input.batch import Batch
from ssdctl.model import fused
from ssdctl.model.constants import constants_of_model
from ssdctl.model.loss import Losses, MultiboxLoss


class ValidationLoss:
    """Adds up the losses of pictures; does not wait for the device.

    Args:
        model: The network.
        device: The device of its outputs.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        constants = constants_of_model(model)
        self._loss = MultiboxLoss(constants=constants).to(device.torch_device)
        # It runs eagerly: only what the device cannot do is replaced.
        fused.swap_in(self._loss, [f for f in device.forms if f.startswith("no_")])
        self._device = device
        self._sums = torch.zeros(len(Losses._fields) + 1, device=device.torch_device)

    def add(self, output: Output, batch: Batch) -> None:
        """Add the losses of a batch; pictures without boxes do not count, as in training.

        Args:
            output: Of the batch, and of further pictures that fill it up.
            batch: Has the ground truth of each of its pictures.
        """
        size, count = len(output.offsets), len(batch.rows)
        boxes = F.pad(batch.boxes[:count], (0, 0, 0, 0, 0, size - count))
        labels = F.pad(batch.labels[:count], (0, 0, 0, size - count))
        place = self._device.torch_device
        with torch.no_grad(), torch.autocast(place.type, enabled=False):
            target_B4N, label_BN = self._loss.targets(boxes.to(place), labels.to(place))
            offsets, logits = (part.to(target_B4N.dtype) for part in output)
            losses = self._loss.compare(offsets, logits, target_B4N, label_BN)
            if self._loss.divisor == "image":
                weight = (labels > 0).any(dim=1).sum().to(place)
                sums = [size * loss for loss in losses]
            else:
                weight = (label_BN > 0).sum()
                sums = [weight * loss for loss in losses]
            self._sums += torch.stack([*sums, weight])

    def sums(self) -> list[float]:
        """Return the sums of the three losses, and what they are divided by.

        That is the number of pictures with boxes, or of default boxes with an object, as the
        network's loss is divided.
        """
        return [float(value) for value in self._sums.tolist()]


def mean_losses(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the means over all ranks; -1 if no picture has a box."""
    total, box, classification, count = (sum(column) for column in zip(*sums, strict=True))
    if not count:
        return {"loss": -1.0, "loss_box": -1.0, "loss_class": -1.0}
    return {
        "loss": total / count,
        "loss_box": box / count,
        "loss_class": classification / count,
    }
