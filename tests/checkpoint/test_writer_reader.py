"""Checkpoints are untrusted files: the newest intact one is read, and no code in them is run."""

import pickle
import re
import threading
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ssdctl.checkpoint.file import load_checkpoint, read_payload
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Architecture, Checkpoint
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.data.annotations import ClassName
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.model.ssd300 import SSD300, load_backbone, load_network


class Malice:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, (str(self.mark), "w"))


def at_step(step: int, **values: Any) -> Checkpoint:
    """Return a checkpoint of a network without weights."""
    optimizer = {"state": {}, "param_groups": []}
    facts = {"model": {}, "optimizer": optimizer, "config": {}, "best_ap": None, **values}
    return Checkpoint(
        path=Path("x.pt"), architecture=Architecture("tiny", "none", 2), step=step, epoch=1.0,
        classes=[ClassName(1, "ball")], samples_seen=1, images=1, global_batch=1, **facts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("payload", "program"),
    [
        ({"train_args": {}, "epoch": -1}, "ultralytics"),
        ({"model": {"module.roi_heads.box_head.fc6.weight": 1}}, "torchvision"),
        ({"fc.weight": 1, "layer1.0.conv1.weight": 1}, "--backbone-weights"),
        (b"cultralytics.nn.tasks\nDetectionModel\n.", "ultralytics"),  # its class is pickled
        (torch.zeros(3), None),
    ],
)
def test_a_files_program_is_named(payload: object, program: str | None, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    if isinstance(payload, bytes):
        path.write_bytes(payload)
    else:
        torch.save(payload, path)
    with pytest.raises(IntegrityError) as caught:
        load_checkpoint(path)
    assert ("looks like" in str(caught.value)) == (program is not None)
    assert (program or "") in str(caught.value)
    for key in payload if isinstance(payload, dict) else ():
        assert key in str(caught.value)


def test_a_folder_or_an_absent_file_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "x.pt", tmp_path / "x.safetensors"):
        with pytest.raises(UsageError, match=re.escape(str(path))) as caught:
            load_checkpoint(path)
        assert "best.pt" in str(caught.value.hint)


def test_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    path, mark = tmp_path / "x.pt", tmp_path / "mark"
    payload = {"format": 1, "model": Malice(mark)}

    def is_refused() -> None:
        with pytest.raises(IntegrityError):
            load_checkpoint(path)
        with pytest.raises(IntegrityError):
            load_backbone(SSD300("tiny", 3, "none"), path)
        assert not mark.exists()

    torch.save(payload, path)
    is_refused()
    path.write_bytes(pickle.dumps(payload, protocol=2))
    is_refused()


def test_third_party_file_from_before_zip_is_read(tmp_path: Path) -> None:
    state = to_third_party(SSD300("tiny", 4, "batch").state_dict(), "nvidia")
    path = tmp_path / "epoch_1.pt"
    torch.save({"model": state}, path, _use_new_zipfile_serialization=False)
    read = load_checkpoint(path)
    assert read.architecture == Architecture("tiny", "batch", 4)
    load_network(read)


class OnTpu(NamedTuple):
    """A tensor that is pickled as one of PyTorch/XLA."""

    tensor: torch.Tensor

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        build = torch._utils._rebuild_device_tensor_from_numpy  # type: ignore[attr-defined]
        return (build, (self.tensor.numpy(), self.tensor.dtype, "xla:1", False))


@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])  # of numpy 1 and 2
def test_third_party_file_of_a_tpu_is_read(tmp_path: Path, module: str) -> None:
    expected = to_third_party(SSD300("tiny", 4, "batch").state_dict(), "nvidia")
    torch.save({"model": {k: OnTpu(v) for k, v in expected.items()}}, tmp_path / "written.pt")
    path = tmp_path / "epoch_1.pt"
    with zipfile.ZipFile(tmp_path / "written.pt") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = re.sub(rb"\bnumpy\._?core\b", module.encode(), old.read(name))
            new.writestr(name, content)
    read = load_checkpoint(path)
    assert read.architecture == Architecture("tiny", "batch", 4)
    assert read_payload(path)["model"].keys() == expected.keys()
    for name, tensor in read_payload(path)["model"].items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0)


def test_a_save_contains_the_state_at_its_request(tmp_path: Path) -> None:
    """Training continues with the same tensors while they are written."""
    moved = threading.Event()

    class Slow(CheckpointFolder):
        def write(self, checkpoint: Checkpoint) -> None:
            assert moved.wait(30)
            super().write(checkpoint)

    weights, momentum = torch.zeros(3), torch.zeros(2)
    saver = Slow(tmp_path, keep=1)
    optimizer = {"state": {0: {"momentum_buffer": momentum}}, "param_groups": []}
    saver.save(at_step(1, model={"w": weights}, optimizer=optimizer))
    weights += 1
    momentum += 1
    moved.set()
    saver.close()
    saved = torch.load(tmp_path / "checkpoints/last.pt")
    assert not saved["model"]["w"].any()
    assert not saved["optimizer"]["state"][0]["momentum_buffer"].any()
