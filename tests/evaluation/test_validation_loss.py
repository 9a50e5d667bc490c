"""The validation loss does not depend on how the images are divided into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_network import Tiny

from ssdctl.device.cpu import Cpu
from ssdctl.evaluation.detect import ValidationLoss
from ssdctl.input.batch import Batch
from ssdctl.input.open import random_batch
from ssdctl.model.backbones import find_backbone

SIZES = ([7], [3, 4], [1] * 7)


def losses(batch: Batch, sizes: list[int], padding: int, backbone: str) -> dict[str, float]:
    """Return the loss of the batch's images in batches of these sizes, filled up with padding."""
    torch.manual_seed(0)
    model: Any = Tiny(has_norm=False)
    model.constants = find_backbone(backbone).CONSTANTS
    loss, start = ValidationLoss(model, Cpu()), 0
    for size in sizes:
        part = Batch(*(field[start : start + size] for field in batch))
        start += size
        filled = torch.cat([part.images, part.images.new_zeros(padding, 300, 300, 3)])
        with torch.no_grad():
            output = model(filled.permute(0, 3, 1, 2).float() / 255)
        loss.add(part, output)
    loss.set_means([loss.sums()])
    return loss.means


@pytest.mark.parametrize("backbone", ["tiny", "vgg16"])
def test_batches_and_padding_do_not_matter(backbone: str) -> None:
    batch = random_batch(7, 4, max_boxes=9)
    labels = batch.labels.clone()
    for number in range(7):  # images with 0 to 5 objects
        labels[number, max(number - 1, 0) :] = 0
    batch = batch._replace(labels=labels, rows=np.arange(7))
    expected = losses(batch, [7], 0, backbone)
    assert expected["loss"] == pytest.approx(expected["loss_box"] + expected["loss_class"])
    for sizes in SIZES:
        for padding in (0, 2):
            assert losses(batch, sizes, padding, backbone) == pytest.approx(expected, rel=1e-5)
