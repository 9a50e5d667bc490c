"""Hostile checkpoints are refused before anything of the size that they claim is allocated."""

import copy
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_network import config

import ssdctl
from ssdctl.boxes import BOXES_PER_CELL
from ssdctl.checkpoint.file import load_checkpoint, read_payload, with_classes
from ssdctl.checkpoint.format import Architecture, Checkpoint
from ssdctl.config.fields import LARGEST_INT
from ssdctl.data.annotations import ClassName
from ssdctl.data.shapes import generate
from ssdctl.device import open_device
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.choices import choose_data
from ssdctl.model.ssd300 import SSD300, load_network
from ssdctl.training.optimizer import build_optimizer
from ssdctl.training.state import restore

Payload = dict[str, Any]


def payload() -> Payload:
    """Return the contents of a checkpoint of the first step, with two classes."""
    return {
        "format": 1,
        "model": SSD300("tiny", 3, "none").state_dict(),
        "trained": None,
        "architecture": {"backbone": "tiny", "extra_norm": "none", "num_classes": 3},
        "classes": [{"id": i, "name": f"class {i}"} for i in (1, 2)],
        "config": {
            "data.root": None,
            "train.lr": 0.1,
            "train.decay_epochs": (1.0, 2.0),
            "train.seed": LARGEST_INT,
        },
        "step": 1,
        "samples_seen": 2,
        "images": 2,
        "global_batch": 2,
        "best_ap": 0.5,
        "optimizer": {"state": {0: {"momentum_buffer": None}}, "param_groups": [{"params": [0]}]},
        "rank_statistics": None,
    }


def save(content: Payload, folder: Path) -> Path:
    path = folder / "x.pt"
    torch.save(content, path)
    return path


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


HOSTILE: dict[str, Callable[[Payload], object]] = {  # more: fuzz/targets.py
    "no image trained on": lambda p: p.update(images=0),
    "20,000 classes in the names only": lambda p: wide(p, 20_000),
    "20,000 classes with narrow heads": lambda p: wide(p, 20_000, 1),
    "fewer names than classes": lambda p: p["classes"].pop(),
    "NaN as the best AP": lambda p: p.update(best_ap=float("nan")),
    "a class name of a megabyte": lambda p: p["classes"][0].update(name="x" * 2**20),
    "a sparse tensor": lambda p: set_weight(p, torch.zeros(12).to_sparse()),
    "a complex tensor": lambda p: set_weight(p, torch.zeros(12, dtype=torch.complex64)),
    "a repeated number": lambda p: set_weight(p, torch.zeros(1).expand(12)),
    "a quantized tensor": lambda p: set_weight(
        p, torch.quantize_per_tensor(torch.zeros(12), 1.0, 0, torch.qint8)
    ),
    "sparse momentum": lambda p: p["optimizer"]["state"].update(
        {0: {"momentum_buffer": torch.zeros(3).to_sparse()}}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore")
def test_hostile_contents(name: str, tmp_path: Path) -> None:
    content = payload()
    load_network(load_checkpoint(save(content, tmp_path)))
    HOSTILE[name](content)
    path = save(content, tmp_path)
    start = time.process_time()
    with pytest.raises(IntegrityError, match=str(path)):
        load_network(load_checkpoint(path))
    assert time.process_time() - start < 5


def test_hostile_heads_are_refused_for_other_classes_too(tmp_path: Path) -> None:
    content = payload()
    set_weight(content, torch.zeros(7))
    read = load_checkpoint(save(content, tmp_path))
    with pytest.raises(IntegrityError, match=r"class_heads\.0\.bias is \(7,\)"):
        with_classes(read, SSD300("tiny", 2, "none"), [ClassName(1, "class 1")])


def resumable(folder: Path, optimizer: str) -> tuple[SSD300, torch.optim.Optimizer, Payload]:
    """Return a network, its optimizer, and the contents of a checkpoint of both."""
    model = load_network(load_checkpoint(save(payload(), folder)))
    content = {**payload(), "model": model.state_dict(), "trained": None}
    content["config"]["train.optimizer"] = optimizer
    built = build_optimizer(model, config(optimizer=optimizer), open_device("cpu"))
    return model, built, {**content, "optimizer": copy.deepcopy(built.state_dict())}


Entries = dict[str, Any]  # the optimizer's state for one parameter
OPTIMIZERS: dict[str, Callable[[Entries], object]] = {
    "a smaller tensor": lambda s: s.update(exp_avg=torch.zeros(1)),
    "a larger tensor": lambda s: s.update(momentum_buffer=torch.zeros(9, 9, 9, 9)),
    "another number of dimensions": lambda s: s.update(exp_avg=torch.zeros(())),
    "integers": lambda s: s.update({name: v.to(torch.int64) for name, v in s.items()}),
    "text instead of a tensor": lambda s: s.update(exp_avg="x", momentum_buffer="x"),
    "a missing tensor": lambda s: [s.pop(n, None) for n in ("exp_avg", "momentum_buffer")],
    "an unknown tensor": lambda s: s.update(more=torch.zeros(3)),
    "a step of several numbers": lambda s: s.update(step=torch.zeros(4)),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_states_of_optimizers(optimizer: str, tmp_path: Path) -> None:
    """The fused kernels would read and write beyond a tensor that is too small."""
    model, built, intact = resumable(tmp_path, optimizer)
    for values in intact["optimizer"]["state"].values():
        for value in values.values():
            value.fill_(3)
    restore(model, built, load_checkpoint(save(intact, tmp_path)))
    tensors = [v for values in built.state.values() for v in values.values()]
    assert tensors
    assert all(bool((tensor == 3).all()) for tensor in tensors)

    def is_refused(content: Payload, name: str) -> None:
        path = save(content, tmp_path)
        with pytest.raises(IntegrityError, match=f"{path}.*{name}"):
            restore(model, built, load_checkpoint(path))

    for spoil in OPTIMIZERS.values():
        content = copy.deepcopy(intact)
        spoil(content["optimizer"]["state"][3])
        is_refused(content, "optimizer")
    state, (first, *others) = (intact["optimizer"][key] for key in ("state", "param_groups"))
    twice = {**first, "params": [0] * len(first["params"])}
    for change in ({"state": {**state, 999: {}}}, {"param_groups": [twice, *others]}):
        is_refused({**intact, "optimizer": intact["optimizer"] | change}, "optimizer")
    average = {**intact["model"], "class_heads.0.bias": torch.zeros(())}
    is_refused({**intact, "trained": intact["model"], "model": average}, r"class_heads\.0\.bias")


def rewritten(path: Path, change: Callable[[bytes], bytes], method: int = 0) -> Path:
    """Change the pickle of a file, with correct CRCs."""
    target = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for info in source.infolist():
            content = source.read(info)
            is_pickle = info.filename.endswith("data.pkl")
            archive.writestr(info.filename, change(content) if is_pickle else content, method)
    return target


FOUR = b"K\x04"  # the length of the storage, and of the tensor
LIES: dict[str, Callable[[bytes], bytes]] = {
    "a longer storage": lambda p: p.replace(FOUR, b"J" + (10**8).to_bytes(4, "little")),
    "a wider type": lambda p: p.replace(b"FloatStorage", b"DoubleStorage"),
    "another record": lambda p: p.replace(b"\x01\0\0\x000", b"\x01\0\0\x001"),
    "a length that is computed": lambda p: p.replace(FOUR, b"cbuiltins\nint\nK\x04\x85R"),
    "a length that is a truth value": lambda p: p.replace(FOUR, b"\x88"),
    "an operation of other pickles": lambda p: p.replace(FOUR, b"I4\n"),
    "an empty stack": lambda p: b"\x80\x02Q.",
}


@pytest.mark.parametrize("name", LIES)
def test_storages_larger_than_their_records(name: str, tmp_path: Path) -> None:
    """PyTorch 2.9 and earlier read beyond the end of their memory."""
    path = save({"a": torch.arange(4.0)}, tmp_path)
    assert read_payload(rewritten(path, lambda p: p))["a"].tolist() == [0, 1, 2, 3]
    changed = rewritten(path, LIES[name])
    with pytest.raises(IntegrityError, match=re.escape(str(changed))):
        read_payload(changed)


def test_zips_that_torch_does_not_write(tmp_path: Path) -> None:
    path = save({"a": torch.arange(4.0)}, tmp_path)
    with pytest.raises(IntegrityError, match="compressed"):  # before anything is unpacked
        read_payload(rewritten(path, lambda _: bytes(10**8), zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/DATA/0", bytes(1000))  # PyTorch takes the first, whichever is named
    with pytest.raises(IntegrityError, match="twice"):
        read_payload(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", bytes(100_000))
        (info,) = archive.infolist()
        archive.filelist.extend([info] * 1000)  # a thousand names for the same bytes
    with pytest.raises(IntegrityError, match="larger than the file"):
        read_payload(path)


def safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(16)


HEADER = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
LONG = HEADER.replace(b"4]", b"%d]" % 10**12).replace(b"16]", b"%d]" % (4 * 10**12))
OTHER_FORMATS = {  # torch.load reads safetensors, too
    "safetensors": safetensors(HEADER),
    "safetensors, a header of 2^63 bytes": (2**63 - 1).to_bytes(8, "little") + HEADER,
    "safetensors, 4 TB": safetensors(LONG),
    "safetensors, deep": safetensors(b"[" * 200_000),
    "empty": b"",
    "half a zip": b"PK\x03\x04 half a zip",
    "a long string in a pickle": b"\x80\x02X\xff\xff\xff\x7f" + b"x" * 100,
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(OTHER_FORMATS[name])
    with pytest.raises(IntegrityError, match=str(path)) as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)  # without the advice to load it unsafely


def remembered(root: Path, store: Path | None) -> Checkpoint:
    return Checkpoint(
        path=Path("x.pt"), model={}, architecture=Architecture("tiny", "none", 1), classes=[],
        config={"data.root": str(root), "data.store": store and str(store)}, step=0, epoch=0,
        samples_seen=0, images=1, global_batch=1, best_ap=None, optimizer={},
    )  # fmt: skip


def test_folders_named_by_a_checkpoint_are_only_read(tmp_path: Path) -> None:
    """Without a store there, one would be written to a folder of the checkpoint's choosing."""
    root, store, own = tmp_path / "data", tmp_path / "home" / ".ssh", tmp_path / "own"
    generate(root, num_train=1, num_val=1)
    own.mkdir()
    own_file = tmp_path / "own.toml"  # a file's dataset does not replace the checkpoint's
    own_file.write_text(f"[data]\nroot = '{own}'\n")
    with pytest.raises(DataError, match=str(root)) as caught:
        choose_data(remembered(root, store), ssdctl.configure(own_file))
    assert "--data" in str(caught.value.hint)
    assert not store.exists()
    # The user's own dataset is prepared where it has to be.
    own_file.write_text(f"[data]\nroot = '{root}'\n")
    assert choose_data(remembered(root, None), ssdctl.configure(own_file)).root == str(root)
    # A store of the user's choosing is written.
    chosen = ssdctl.configure(data={"store": own})
    assert choose_data(remembered(root, store), chosen).store == str(own)
    # No other dataset is scored in place of one that is gone, unless the user names it.
    gone = remembered(tmp_path / "gone", None)
    with pytest.raises(DataError, match="gone, which is not there"):
        choose_data(gone, ssdctl.configure())
    assert choose_data(gone, ssdctl.configure(own_file)).root == str(root)
