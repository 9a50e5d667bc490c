"""Tiles of a large image and the merging of their detections; a device whose memory is full."""

import numpy as np
import pytest
import torch
from tiny_network import build_training
from torch import Tensor

from ssdctl.data.tiles import Window
from ssdctl.device import open_device
from ssdctl.errors import UsageError
from ssdctl.inference.detector import Detector, DetectorConfig
from ssdctl.model.postprocess import cut_flags, merge

Row = tuple[tuple[int, int, int, int], float, int, bool]  # box, score, label, is cut


def test_boxes_at_inner_edges_are_cut() -> None:
    boxes = np.array([[100, 20, 150, 60], [120, 0, 150, 60], [120, 20, 200, 60.0]])
    window = Window(100, 0, 200, 100)
    assert cut_flags(boxes, window, 400, 100).tolist() == [True, False, True]
    assert cut_flags(boxes, window, 200, 100).tolist() == [True, False, False]


WHOLE, PART, SIDE = (0, 0, 100, 40), (0, 0, 30, 40), (11, 10, 51, 50)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([((10, 10, 50, 50), 0.6, 1, False), (SIDE, 0.9, 1, False), (SIDE, 0.8, 2, False),
          ((200, 10, 240, 50), 0.95, 1, False)], [3, 1, 2]),
        ([(PART, 0.9, 1, True), (WHOLE, 0.4, 1, False)], [1]),  # not part of an object for all
        ([(PART, 0.9, 1, False), (WHOLE, 0.4, 1, False)], [0, 1]),  # a small one before it
        ([(WHOLE, 0.9, 1, False), (PART, 0.4, 1, False)], [0, 1]),
        ([(PART, 0.9, 1, True), (WHOLE, 0.4, 2, False)], [0, 1]),  # another class
    ],
)  # fmt: skip
def test_one_object_of_two_tiles_is_one_detection(rows: list[Row], kept: list[int]) -> None:
    boxes, scores, labels, is_cut = (np.array(column) for column in zip(*rows, strict=True))
    assert merge(boxes.astype(np.float64), scores, labels, is_cut, 0.5).tolist() == kept
    none = slice(0)
    assert not len(merge(boxes[none], scores[none], labels[none], is_cut[none], 0.5))


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
    images = torch.zeros((num_images, 300, 300, 3), dtype=torch.uint8)
    with pytest.raises(UsageError, match="out of memory on device cpu") as caught:
        detector(images)
    assert remedy in (caught.value.hint or "")
