"""Detection over a split: every image once, for all batch sizes; bad outputs are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli
from PIL import Image

from ssdctl.checkpoint.file import load_checkpoint, load_network
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.evaluation import detect
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.inference.detector import Detector, DetectorConfig


@pytest.fixture(scope="module")
def split(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Split:
    store = tmp_path_factory.mktemp("store")
    return open_dataset(shapes, store)["val"]


def detected(
    checkpoint: Path, split: Split, rows: list[int], batch_size: int, **more: Any
) -> Detections:
    device = open_device("cpu")
    model = device.place(load_network(load_checkpoint(checkpoint)))
    detector = Detector(model, device, DetectorConfig(score_threshold=0.02))
    images = np.array(rows, np.int64)
    result = detect.detect(detector, split, images, batch_size=batch_size, threads=2, **more)
    assert model.training  # its mode is restored
    assert result is not None
    return result


def table(found: Detections) -> np.ndarray:
    return np.column_stack([found.image_ids, found.boxes, found.scores, found.category_ids])


@pytest.mark.slow(in_ci=True)
def test_batches_do_not_matter(
    checkpoint: Path, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = detected(checkpoint, split, list(range(9)), 9)
    assert len(at_once.scores)
    monkeypatch.setattr(detect, "FEW_CORES", 0)  # use the decoding thread
    parts = detected(checkpoint, split, list(range(9)), 4)  # the last batch holds one image
    assert np.array_equal(table(parts), table(at_once))
    shares = [detected(checkpoint, split, list(range(9))[rank::2], 4) for rank in (0, 1)]
    rows = np.concatenate([table(s) for s in shares])
    assert np.array_equal(rows[np.argsort(rows[:, 0], kind="stable")], table(at_once))


def test_images_that_do_not_open_have_no_detections(checkpoint: Path, split: Split) -> None:
    usable = split.usable.copy()
    usable[[0, 5]] = False
    detections = detected(checkpoint, split._replace(usable=usable), list(range(9)), 4)
    bad = set(split.image_ids[[0, 5]].tolist())
    assert set(detections.image_ids.tolist()) == set(split.image_ids.tolist()) - bad


def test_category_ids_are_chosen_or_left_out(checkpoint: Path, split: Split) -> None:
    ids = {c.id: place - 1 for place, c in enumerate(split.classes)}  # -1, 0, 1 ...
    found = detected(checkpoint, split, [0, 1], 2)
    new = np.array([ids[n] for n in found.category_ids.tolist()])
    chosen = detected(checkpoint, split, [0, 1], 2, category_ids=np.array([*ids.values()]))
    assert {-1, 0} < set(new.tolist())
    assert chosen.category_ids.tolist() == new[new >= 0].tolist()
    assert np.array_equal(chosen.boxes, found.boxes[new >= 0])


def test_nothing_to_look_at(checkpoint: Path, split: Split) -> None:
    assert table(detected(checkpoint, split, [], 4)).shape == (0, 7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_exit_7(cli: Cli, checkpoint: Path, value: float) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    payload["model"]["class_heads.2.bias"][0] = value
    torch.save(payload, "bad.pt")
    Image.new("RGB", (40, 30)).save("x.png")
    for command in (["evaluate", "bad.pt", "--device", "cpu"], ["predict", "bad.pt", "x.png"]):
        result = cli(*command)
        assert result.code == 7, result.err
        assert "NaN or infinite" in result.err
        assert result.out == ""
