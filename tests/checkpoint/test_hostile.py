"""Hostile checkpoints are refused before anything of the size that they claim is allocated."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdctl.boxes.default_boxes import BOXES_PER_CELL
from ssdctl.checkpoint.reader import (
    Checkpoint,
    load_network,
    read_checkpoint,
    read_payload,
    with_classes,
)
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.config import DataConfig
from ssdctl.data.formats.coco import ClassName
from ssdctl.data.shapes import generate
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluate.checkpoint import choose_data
from ssdctl.model.ssd300 import SSD300

Payload = dict[str, Any]


def payload(num_classes: int = 3) -> Payload:
    """The contents of a checkpoint of the first step."""
    return {
        "format": 1,
        "model": SSD300("resnet18", num_classes, "none").state_dict(),
        "trained": None,
        "architecture": {
            "backbone": "resnet18",
            "extra_norm": "none",
            "num_classes": num_classes,
        },
        "classes": [{"id": i, "name": f"class {i}"} for i in range(1, num_classes)],
        "config": {"data.root": None, "train.lr": 0.1, "train.decay_epochs": (1.0, 2.0)},
        "step": 1,
        "samples_seen": 2,
        "images": 2,
        "global_batch": 2,
        "best_ap": 0.5,
        "optimizer": {"state": {0: {"momentum_buffer": None}}, "param_groups": [{"params": [0]}]},
    }


def save(content: Payload, folder: Path) -> Path:
    path = folder / "x.pt"
    torch.save(content, path)
    return path


def test_an_intact_one_is_read(tmp_path: Path) -> None:
    load_network(read_checkpoint(save(payload(), tmp_path)))


def wide(content: Payload, num_classes: int, width: int | None = None) -> None:
    """Claim more classes, with heads that are as large, or narrow."""
    content["architecture"]["num_classes"] = num_classes
    content["classes"] = [{"id": i, "name": str(i)} for i in range(1, num_classes)]
    if width is not None:
        for level, boxes in enumerate(BOXES_PER_CELL):
            weight = torch.zeros(boxes * num_classes, width, 1, 1)
            content["model"][f"class_heads.{level}.weight"] = weight
            content["model"][f"class_heads.{level}.bias"] = weight[:, 0, 0, 0].clone()


def set_weight(content: Payload, tensor: torch.Tensor) -> None:
    content["model"]["class_heads.0.bias"] = tensor


HOSTILE: dict[str, Callable[[Payload], object]] = {
    "20,000 classes in the names only": lambda p: wide(p, 20_000),
    "20,000 classes with narrow heads": lambda p: wide(p, 20_000, 1),
    "a billion classes": lambda p: p["architecture"].update(num_classes=10**9),
    "10^400 classes": lambda p: p["architecture"].update(num_classes=10**400),
    "fewer names than classes": lambda p: p["classes"].pop(),
    "10^400 samples": lambda p: p.update(samples_seen=10**400),
    "10^400 steps": lambda p: p.update(step=10**400),
    "10^400 images": lambda p: p.update(images=10**400),
    "NaN as the best AP": lambda p: p.update(best_ap=float("nan")),
    "a class id of 10^400": lambda p: p["classes"][0].update(id=10**400),
    "a setting of 10^400": lambda p: p["config"].update({"train.lr": 10**400}),
    "a tensor as a setting": lambda p: p["config"].update({"train.lr": torch.zeros(3)}),
    "a number as data.root": lambda p: p["config"].update({"data.root": 7}),
    "a list as data.store": lambda p: p["config"].update({"data.store": ["/tmp"]}),
    "NUL in data.root": lambda p: p["config"].update({"data.root": "a\0b"}),
    "a sparse tensor": lambda p: set_weight(p, torch.zeros(12).to_sparse()),
    "a meta tensor": lambda p: set_weight(p, torch.zeros(12, device="meta")),
    "a complex tensor": lambda p: set_weight(p, torch.zeros(12, dtype=torch.complex64)),
    "a repeated number": lambda p: set_weight(p, torch.zeros(1).expand(10**12)),
    "a quantized tensor": lambda p: set_weight(
        p, torch.quantize_per_tensor(torch.zeros(12), 1.0, 0, torch.qint8)
    ),
    "sparse momentum": lambda p: p["optimizer"]["state"].update(
        {0: {"momentum_buffer": torch.zeros(3).to_sparse()}}
    ),
    "a list as an optimizer's state": lambda p: p["optimizer"]["state"].update({0: [1]}),
    "groups without parameters": lambda p: p["optimizer"].update(param_groups=[{"lr": 1}]),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore")
def test_hostile_contents(name: str, tmp_path: Path) -> None:
    content = payload()
    HOSTILE[name](content)
    path = save(content, tmp_path)
    start = time.monotonic()
    with pytest.raises(IntegrityError, match=str(path)):
        load_network(read_checkpoint(path))
    assert time.monotonic() - start < 5


def test_hostile_heads_are_refused_for_other_classes_too(tmp_path: Path) -> None:
    content = payload()
    set_weight(content, torch.zeros(7))
    read = read_checkpoint(save(content, tmp_path))
    with pytest.raises(IntegrityError, match=r"class_heads\.0\.bias is \(7,\)"):
        with_classes(read, SSD300("resnet18", 2, "none"), [ClassName(1, "class 1")])


@pytest.mark.parametrize("numbers", [{"iteration": 10**400}, {"epoch": float("nan")}])
def test_numbers_of_third_party_files(numbers: dict[str, Any], tmp_path: Path) -> None:
    state = to_third_party(SSD300("resnet18", 4, "none").state_dict(), "nvidia")
    with pytest.raises(IntegrityError, match="not a number"):
        read_checkpoint(save({"model": state, **numbers}, tmp_path))


def test_compressed_entries_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    path, bomb = save(payload(), tmp_path), tmp_path / "bomb.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(bomb, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info.filename, content, zipfile.ZIP_DEFLATED)
        target.writestr("archive/data/bomb", bytes(10**8), zipfile.ZIP_DEFLATED)
    with pytest.raises(IntegrityError, match="compressed"):
        read_payload(bomb)


def test_overlapping_entries_are_refused(tmp_path: Path) -> None:
    """A thousand names for the same bytes."""
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", bytes(100_000))
        (info,) = archive.infolist()
        archive.filelist.extend([info] * 1000)
    with pytest.raises(IntegrityError, match="larger than the file"):
        read_payload(path)


def remembered(root: Path, store: Path | None) -> Checkpoint:
    return Checkpoint(
        path=Path("x.pt"), model={}, architecture=None, classes=[],  # type: ignore[arg-type]
        config={"data.root": str(root), "data.store": store and str(store)}, step=0, epoch=0,
        samples_seen=0, images=1, global_batch=1, best_ap=None, optimizer={},
    )  # fmt: skip


def test_folders_named_by_a_checkpoint_are_only_read(tmp_path: Path) -> None:
    """Without a store there, one would be written to a folder of the checkpoint's choosing."""
    root, store, own = tmp_path / "data", tmp_path / "home" / ".ssh", tmp_path / "own"
    generate(root, num_train=1, num_val=1)
    own.mkdir()
    with pytest.raises(DataError, match=str(root)) as caught:
        choose_data(remembered(root, store), DataConfig(root=str(own)), set())
    assert "--data" in str(caught.value.hint)
    assert not store.exists()
    # The user's own dataset is prepared where it has to be.
    data = DataConfig(root=str(root))
    assert choose_data(remembered(root, None), data, set()).root == str(root)
    # A store of the user's choosing is written.
    chosen = choose_data(remembered(root, store), DataConfig(store=str(own)), {"data.store"})
    assert chosen.store == str(own)
