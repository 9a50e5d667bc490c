"""Checkpoints are untrusted files: the newest intact one is read, and no code in them is run."""

from __future__ import annotations

import pickle
import shutil
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.reader import (
    Architecture,
    load_backbone,
    load_network,
    read_checkpoint,
    same_classes,
)
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.data.classes import ClassName
from ssdctl.errors import DiskError, IntegrityError, UsageError
from ssdctl.model.ssd300 import SSD300


class Malice:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, (str(self.mark), "w"))


def test_payload_is_plain(checkpoint: Path) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    assert all(isinstance(v, torch.Tensor) for v in payload["model"].values())
    assert payload["step"] == 3
    assert payload["samples_seen"] == 6
    assert payload["classes"][3] == {"id": 7, "name": "star"}
    assert payload["config"]["model.backbone"] == "tiny"
    assert payload["architecture"]["num_classes"] == 6


def test_network_round_trip(checkpoint: Path) -> None:
    read = read_checkpoint(checkpoint)
    for name, tensor in load_network(read).state_dict().items():
        assert torch.equal(tensor, read.model[name])


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 half a zip"])
def test_a_file_that_is_not_a_checkpoint_is_an_integrity_error(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=str(path)) as caught:
        read_checkpoint(path)
    assert "weights_only" not in str(caught.value)  # without the advice to load it unsafely


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda payload: payload.pop(key)


def _with(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda payload: payload.update(changes)


@pytest.mark.parametrize(
    "spoil",
    [
        *map(_without, ("architecture", "classes", "samples_seen", "images", "optimizer")),
        _with(model={"weight": "no tensor"}),
        _with(trained=[1, 2]),
        _with(images=0),
        _with(classes=[{"id": 1}]),
        _with(classes=7),
        _with(architecture={"backbone": "vgg11", "extra_norm": "none", "num_classes": 6}),
        _with(architecture={"backbone": "tiny"}),
        _with(architecture={"backbone": "tiny", "extra_norm": "odd", "num_classes": 6}),
        _with(architecture={"backbone": "tiny", "extra_norm": "none", "num_classes": "six"}),
        _with(step="x"),
        _with(samples_seen=-1),
        _with(global_batch=0),
        _with(best_ap="x"),
        _with(config=[1]),
        _with(optimizer={"state": {}}),
    ],
)
def test_a_payload_with_a_part_amiss_is_an_integrity_error(
    spoil: Callable[[dict[str, Any]], object], checkpoint: Path, tmp_path: Path
) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    spoil(payload)
    path = tmp_path / "x.pt"
    torch.save(payload, path)
    with pytest.raises(IntegrityError, match="parts missing"):
        read_checkpoint(path)


@pytest.mark.parametrize("payload", [{"format": 99}, {"state": 1}, [1, 2], torch.zeros(3)])
def test_files_of_other_programs_are_not_checkpoints(payload: object, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(payload, path)
    with pytest.raises(IntegrityError, match="not a checkpoint that this version"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"model.layer1.0.weight": "a word"}, "its weights are not tensors"),
        ({"model.layer1.0.weight": torch.zeros(64, 3, 7, 7)}, "not an SSD300 on a ResNet"),
    ],
)
def test_what_only_resembles_a_third_party_file(
    state: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "peer.pt"
    torch.save({"model": state}, path)
    with pytest.raises(IntegrityError, match=f"looks like mlperf's, but .*{words}"):
        read_checkpoint(path)


@pytest.mark.parametrize("changes", [{"iteration": "x"}, {"iteration": [1]}, {"epoch": 10**400}])
def test_a_third_party_file_with_invalid_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "peer.pt"
    state = to_third_party(SSD300("tiny", 4, "none").state_dict(), "nvidia")
    torch.save({"model": state, **changes}, path)
    with pytest.raises(IntegrityError, match="is not a number"):
        read_checkpoint(path)


def test_a_checkpoint_is_no_backbone(checkpoint: Path) -> None:
    with pytest.raises(IntegrityError, match="not a state dict"):
        load_backbone(SSD300("tiny", 3, "none"), checkpoint)


def test_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder") as caught:
        read_checkpoint(tmp_path)
    assert "best.pt" in str(caught.value.hint)


def test_classes_of_a_checkpoint(checkpoint: Path) -> None:
    read = read_checkpoint(checkpoint)
    without_ids = [ClassName(None, c.name) for c in read.classes]  # a third-party file has no ids
    assert same_classes(read, read.classes)
    assert same_classes(read._replace(classes=without_ids), read.classes)
    assert same_classes(read._replace(classes=[]), read.classes)  # no names
    assert not same_classes(read._replace(classes=[]), read.classes[1:])
    assert not same_classes(read, read.classes[::-1])
    assert not same_classes(read, read.classes[1:])


def test_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_checkpoint(tmp_path / "x.pt")


def test_every_flipped_byte_of_the_weights_is_seen(checkpoint: Path, tmp_path: Path) -> None:
    content = bytearray(checkpoint.read_bytes())
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(checkpoint) as archive:
        entries = [e for e in archive.infolist() if "/data/" in e.filename and e.file_size]
    assert len(entries) > 100
    for entry in entries[:: len(entries) // 7]:
        # The lengths of name and padding are in the local header.
        lengths = struct.unpack_from("<HH", content, entry.header_offset + 26)
        position = entry.header_offset + 30 + sum(lengths) + entry.file_size // 2
        spoiled = bytearray(content)
        spoiled[position] ^= 1
        path.write_bytes(spoiled)
        with pytest.raises(IntegrityError):
            read_checkpoint(path)


@pytest.mark.parametrize("as_zip", [True, False])
def test_malicious_pickle_is_not_run(tmp_path: Path, as_zip: bool) -> None:
    path, mark = tmp_path / "x.pt", tmp_path / "mark"
    payload = {"format": 1, "model": Malice(mark)}
    if as_zip:
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload, protocol=2))
    with pytest.raises(IntegrityError):
        read_checkpoint(path)
    with pytest.raises(IntegrityError):
        load_backbone(SSD300("tiny", 3, "none"), path)
    assert not mark.exists()


def test_missing_extra_and_misshapen_weights_are_listed(checkpoint: Path) -> None:
    read = read_checkpoint(checkpoint)
    model = dict(read.model)
    del model["backbone.conv1.weight"]
    model["surplus"] = torch.zeros(1)
    model["backbone.bn1.weight"] = torch.zeros(3)
    with pytest.raises(IntegrityError) as caught:
        load_network(read._replace(model=model))
    for words in ("missing backbone.conv1", "unexpected surplus", "bn1.weight is (3,), not (8,)"):
        assert words in str(caught.value)


@pytest.mark.slow(in_ci=True)
@pytest.mark.process
def test_weights_from_before_batch_norm_counted_fit(tmp_path: Path) -> None:
    """resnet34-333f7ec4 and resnet50-19c8e357 have no num_batches_tracked."""
    from torchvision.models import resnet18

    state = {k: v for k, v in resnet18().state_dict().items() if "num_batches" not in k}
    path = tmp_path / "old.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    model = SSD300("resnet18", 3, "none")
    load_backbone(model, path)
    assert torch.equal(model.backbone.conv1.weight, state["conv1.weight"])
    assert model.backbone.bn1.num_batches_tracked == 0


def test_third_party_file_from_before_zip_is_read(tmp_path: Path) -> None:
    state = to_third_party(SSD300("tiny", 4, "batch").state_dict(), "nvidia")
    path = tmp_path / "epoch_1.pt"
    torch.save({"model": state}, path, _use_new_zipfile_serialization=False)
    read = read_checkpoint(path)
    assert read.architecture == Architecture("tiny", "batch", 4)
    load_network(read)


def test_flipped_bits_in_the_zip_directory_are_damage(checkpoint: Path, tmp_path: Path) -> None:
    content = checkpoint.read_bytes()
    path = tmp_path / "x.pt"
    start = content.rindex(b"PK\x01\x02", 0, len(content) - 3000)
    for offset in range(4, 46, 3):
        spoiled = bytearray(content)
        spoiled[start + offset] ^= 0x55
        path.write_bytes(spoiled)
        try:
            read_checkpoint(path)
        except IntegrityError:
            continue  # anything else would be a bug; some bits mean nothing


def test_none_intact_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001.pt").write_bytes(b"PK spoiled")
    with pytest.raises(IntegrityError, match="all 1 checkpoints") as error:
        CheckpointFolder(tmp_path, keep=1).newest_intact()
    assert "trying the one before" not in str(error.value)


def test_newest_intact_wins(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_run / "checkpoints", tmp_path / "checkpoints")
    folder = CheckpointFolder(tmp_path, keep=2)
    (good,) = folder.steps()
    later = good.with_name("step-00000009.pt")
    later.write_bytes(good.read_bytes()[:-1000])
    read, warnings = folder.newest_intact()
    assert read is not None
    assert read.path == good
    assert len(warnings) == 1
    assert later.name in warnings[0]


def test_the_newest_few_stay_and_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in range(1, 6):
        folder.write({"step": step})
        if step == 2:
            folder.mark_best(step)
    assert [p.name for p in folder.steps()] == ["step-00000004.pt", "step-00000005.pt"]
    assert folder.steps()[-1].samefile(folder.path / "last.pt")
    assert torch.load(folder.path / "best.pt") == {"step": 2}


def test_a_save_contains_the_state_at_its_request(tmp_path: Path) -> None:
    """Training continues with the same tensors while they are written."""
    moved = threading.Event()

    class Slow(CheckpointFolder):
        def write(self, payload: dict[str, Any]) -> None:
            assert moved.wait(30)
            super().write(payload)

    weights, momentum = torch.zeros(3), torch.zeros(2)
    saver = Slow(tmp_path, keep=1)
    saver.save({"step": 1, "model": {"w": weights}, "optimizer": {"state": [(0, momentum)]}})
    weights += 1
    momentum += 1
    moved.set()
    saver.close()
    saved = torch.load(tmp_path / "checkpoints/last.pt")
    assert not saved["model"]["w"].any()
    assert not saved["optimizer"]["state"][0][1].any()


def test_a_failed_save_is_reported_at_the_next_check(tmp_path: Path) -> None:
    class Full(CheckpointFolder):
        def write(self, payload: dict[str, Any]) -> None:
            raise DiskError("no space left")

    def look() -> None:
        for _ in range(3000):  # at the ends of steps, which never wait for a save
            saver.check()
            time.sleep(0.01)

    saver = Full(tmp_path, keep=1)
    saver.save({"step": 1})
    with pytest.raises(DiskError):
        look()
    saver.close()


def test_stale_temporaries_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    dead, foreign = folder / ".step-00000001.pt.0123456789ab.999999999.tmp", folder / "notes.tmp"
    dead.touch()
    foreign.touch()
    CheckpointFolder(tmp_path, keep=1).clean()
    assert not dead.exists()
    assert foreign.exists()


@pytest.mark.process
@pytest.mark.process
def test_backbone_weights_of_torchvision_fit(tmp_path: Path) -> None:
    from torchvision.models import resnet18

    torch.manual_seed(1)
    resnet = resnet18()
    path = tmp_path / "resnet18.pth"
    torch.save(resnet.state_dict(), path)
    model = SSD300("resnet18", 3, "none")
    load_backbone(model, path)
    assert torch.equal(model.backbone.layer3[1].conv2.weight, resnet.layer3[1].conv2.weight)
    with pytest.raises(IntegrityError, match=r"missing layer1\.2"):
        load_backbone(SSD300("resnet34", 3, "none"), path)
