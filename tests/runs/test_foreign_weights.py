"""Weights of other programs, or of a broken copy, are named as what they are."""

import hashlib
from pathlib import Path

import pytest
from conftest import Cli

from ssdctl.checkpoint.locate import resolve_source
from ssdctl.errors import UsageError
from ssdctl.model.pretrained import weights_named

TENSORFLOW = ("model.ckpt-100.index", "model.ckpt-100.data-00000-of-00001")


@pytest.mark.parametrize("name", [".", "model.ckpt-100", *TENSORFLOW])
def test_a_checkpoint_of_tensorflow(tmp_path: Path, name: str) -> None:
    for file in TENSORFLOW:
        (tmp_path / file).touch()
    with pytest.raises(UsageError, match="TensorFlow"):
        resolve_source(tmp_path / name)
    if not (tmp_path / name).is_file():
        with pytest.raises(UsageError, match="TensorFlow"):
            weights_named(str(tmp_path / name))
    with pytest.raises(UsageError) as other:
        resolve_source(tmp_path / "model")
    assert "TensorFlow" not in str(other.value)


def test_a_run_means_its_best_checkpoint_or_else_its_last(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("last.pt", "best.pt"):
        path = tmp_path / "checkpoints" / name
        path.touch()
        assert resolve_source(tmp_path) == path


def test_a_backbone_without_the_hash_of_its_name(cli: Cli, tmp_path: Path) -> None:
    content = b"weights"
    digits = hashlib.sha256(content).hexdigest()[:8]
    for name, code in ((digits, 0), ("0123456f", 5), ("20240131", 0)):
        path = tmp_path / f"resnet34-{name}.pth"
        path.write_bytes(content)
        result = cli("train", "--dry-run", "--fake-data", "--backbone-weights", path).expect(code)
        assert (digits in result.err) == (code == 5)
    path = tmp_path / "resnet34-0123456f.pth"
    run = ("--fake-data", "--device", "cpu", "--out", tmp_path / "run", "--backbone-weights", path)
    cli("train", *run).expect(5, digits)
