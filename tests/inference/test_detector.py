"""The detector: what it does when a device's memory is full."""

from __future__ import annotations

import pytest
import torch
from tiny_network import build_training
from torch import Tensor

from ssdctl.device import open_device
from ssdctl.errors import UsageError
from ssdctl.inference.detector import Detector, DetectorConfig


@pytest.mark.parametrize(
    ("num_images", "remedy"), [(8, "evaluate.batch_size=4"), (1, "--device cpu")]
)
def test_full_memory_names_a_batch_that_may_fit(
    num_images: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = open_device("cpu")
    model, _, _ = build_training(device)

    def full(_: Tensor) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 TB")

    monkeypatch.setattr(model, "forward", full)
    detector = Detector(model.eval(), device, DetectorConfig(score_threshold=0.05, nms_iou=0.5))
    image_files = torch.zeros((num_images, 300, 300, 3), dtype=torch.uint8)
    with pytest.raises(UsageError, match="out of memory on device cpu") as caught:
        detector(image_files)
    assert remedy in (caught.value.hint or "")
