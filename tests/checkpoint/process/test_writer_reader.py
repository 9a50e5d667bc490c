"""Checkpoints are untrusted files: the newest intact one is read, and no code in them is run."""

import struct
import zipfile
from pathlib import Path

import pytest
import torch

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.errors import IntegrityError
from ssdctl.model.ssd300 import SSD300, load_backbone, load_network


def test_a_checkpoint_is_plain_and_read_back(checkpoint: Path) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    assert all(isinstance(v, torch.Tensor) for v in payload["model"].values())
    assert (payload["step"], payload["samples_seen"]) == (3, 6)
    assert payload["classes"][3] == {"id": 7, "name": "star"}
    assert payload["config"]["model.backbone"] == "tiny"
    assert payload["architecture"]["num_classes"] == 6
    read = load_checkpoint(checkpoint)
    for name, tensor in load_network(read).state_dict().items():
        assert torch.equal(tensor, read.model[name])
    with pytest.raises(IntegrityError, match="not backbone weights"):
        load_backbone(SSD300("tiny", 3, "none"), checkpoint)


def test_flipped_bits_are_seen(checkpoint: Path, tmp_path: Path) -> None:
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
            load_checkpoint(path)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_backbone_weights_of_training_scripts(tmp_path: Path, key: str) -> None:
    state, path = SSD300("tiny", 3, "none").backbone.state_dict(), tmp_path / "x.pth"
    torch.save({key: {f"module.{k}": v for k, v in state.items()}, "epoch": 1}, path)
    load_backbone(model := SSD300("tiny", 3, "none"), path)
    assert all(torch.equal(v, state[k]) for k, v in model.backbone.state_dict().items())


@pytest.mark.slow(in_ci=True)
def test_weights_from_before_batch_norm_counted_fit(tmp_path: Path) -> None:
    """resnet34-333f7ec4 and resnet50-19c8e357 have no num_batches_tracked."""
    from torchvision.models import resnet18

    state = {k: v for k, v in resnet18().state_dict().items() if "num_batches" not in k}
    path = tmp_path / "old.pth"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    model = SSD300("resnet18", 3, "none")
    load_backbone(model, path)
    for name in ("conv1.weight", "layer3.1.conv2.weight"):
        assert torch.equal(model.backbone.state_dict()[name], state[name])
    assert model.backbone.bn1.num_batches_tracked == 0
    with pytest.raises(IntegrityError, match=r"missing layer1\.2"):
        load_backbone(SSD300("resnet34", 3, "none"), path)
