"""Hostile checkpoints are refused before anything of the size that they claim is allocated."""

from __future__ import annotations

import copy
import re
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdctl.boxes import BOXES_PER_CELL
from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.file import load_checkpoint, load_network, read_payload, with_classes
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.config import DataConfig, resolve
from ssdctl.config.fields import LARGEST_INT
from ssdctl.config.resolve import Override, of_call
from ssdctl.data.annotations import ClassName
from ssdctl.data.shapes import generate
from ssdctl.device import open_device
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.evaluate import choose_data
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.optimizer import build_optimizer
from ssdctl.training.state import restore

Payload = dict[str, Any]


def payload(num_classes: int = 3) -> Payload:
    """The contents of a checkpoint of the first step."""
    return {
        "format": 1,
        "model": SSD300("tiny", num_classes, "none").state_dict(),
        "trained": None,
        "architecture": {
            "backbone": "tiny",
            "extra_norm": "none",
            "num_classes": num_classes,
        },
        "classes": [{"id": i, "name": f"class {i}"} for i in range(1, num_classes)],
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
    }


def save(content: Payload, folder: Path) -> Path:
    path = folder / "x.pt"
    torch.save(content, path)
    return path


def test_an_intact_one_is_read(tmp_path: Path) -> None:
    load_network(load_checkpoint(save(payload(), tmp_path)))


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


def architecture(**fields: object) -> Callable[[Payload], object]:
    return lambda p: p.update(architecture=fields)


HOSTILE: dict[str, Callable[[Payload], object]] = {
    "no optimizer": lambda p: p.pop("optimizer"),
    "text as a weight": lambda p: p.update(model={"weight": "no tensor"}),
    "a list as the trained weights": lambda p: p.update(trained=[1, 2]),
    "no image trained on": lambda p: p.update(images=0),
    "a class without a name": lambda p: p.update(classes=[{"id": 1}] * 2),
    "an unknown backbone": architecture(backbone="vgg11", extra_norm="none", num_classes=3),
    "a negative position": lambda p: p.update(samples_seen=-1),
    "an empty batch": lambda p: p.update(global_batch=0),
    "text as the best AP": lambda p: p.update(best_ap="x"),
    "text as a rank's statistics": lambda p: p.update(rank_statistics=[["x"]]),
    "20,000 classes in the names only": lambda p: wide(p, 20_000),
    "20,000 classes with narrow heads": lambda p: wide(p, 20_000, 1),
    "a billion classes": lambda p: p["architecture"].update(num_classes=10**9),
    "10^400 classes": lambda p: p["architecture"].update(num_classes=10**400),
    "a tensor as classes": lambda p: p.update(classes=torch.zeros(3)),
    "a tensor as settings": lambda p: p.update(config=torch.zeros(2, 2)),
    "fewer names than classes": lambda p: p["classes"].pop(),
    "10^400 samples": lambda p: p.update(samples_seen=10**400),
    "NaN as the best AP": lambda p: p.update(best_ap=float("nan")),
    "a class id of 10^400": lambda p: p["classes"][0].update(id=10**400),
    "a class name of a megabyte": lambda p: p["classes"][0].update(name="x" * 2**20),
    "a setting of 10^400": lambda p: p["config"].update({"train.lr": 10**400}),
    "a number as data.root": lambda p: p["config"].update({"data.root": 7}),
    "NUL in data.root": lambda p: p["config"].update({"data.root": "a\0b"}),
    "a sparse tensor": lambda p: set_weight(p, torch.zeros(12).to_sparse()),
    "a meta tensor": lambda p: set_weight(p, torch.zeros(12, device="meta")),
    "a complex tensor": lambda p: set_weight(p, torch.zeros(12, dtype=torch.complex64)),
    "a repeated number": lambda p: set_weight(p, torch.zeros(1).expand(12)),
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


@pytest.mark.parametrize(
    "value", [1.5, [1], torch.zeros(3), {1: torch.zeros(2)}, {0: "background", 1: "a"}], ids=repr
)
def test_label_maps_of_third_party_files(value: object, tmp_path: Path) -> None:
    state = to_third_party(SSD300("tiny", 4, "none").state_dict(), "nvidia")
    with pytest.raises(IntegrityError, match=r"label_map[` \[]|malformed"):
        load_checkpoint(save({"model": state, "label_map": value}, tmp_path))


@pytest.mark.parametrize(
    "numbers",
    [
        *({"iteration": value} for value in (10**400, "x", [1])),
        *({"epoch": value} for value in (10**400, float("nan"))),
    ],
)
def test_numbers_of_third_party_files(numbers: dict[str, Any], tmp_path: Path) -> None:
    state = to_third_party(SSD300("tiny", 4, "none").state_dict(), "nvidia")
    with pytest.raises(IntegrityError, match=next(iter(numbers))):
        load_checkpoint(save({"model": state, **numbers}, tmp_path))


def resumable(
    folder: Path, optimizer: str = "sgd"
) -> tuple[SSD300, torch.optim.Optimizer, Payload]:
    """Return a network, its optimizer, and the contents of a checkpoint of both."""
    config = resolve(
        overrides=[Override("train.optimizer", optimizer, of_call("test"))]
    ).config.train
    model = load_network(load_checkpoint(save(payload(), folder)))
    content = {**payload(), "model": model.state_dict(), "trained": None}
    content["config"]["train.optimizer"] = optimizer
    built = build_optimizer(model, config, open_device("cpu"))
    return model, built, {**content, "optimizer": copy.deepcopy(built.state_dict())}


OPTIMIZERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a smaller tensor": lambda s: s["state"][3].update(exp_avg=torch.zeros(1)),
    "a larger tensor": lambda s: s["state"][3].update(momentum_buffer=torch.zeros(9, 9, 9, 9)),
    "another number of dimensions": lambda s: s["state"][3].update(exp_avg=torch.zeros(())),
    "integers": lambda s: s["state"][3].update(
        {name: v.to(torch.int64) for name, v in s["state"][3].items()}
    ),
    "text instead of a tensor": lambda s: s["state"][3].update(exp_avg="x", momentum_buffer="x"),
    "a missing tensor": lambda s: [
        s["state"][3].pop(name, None) for name in ("exp_avg", "momentum_buffer")
    ],
    "an unknown tensor": lambda s: s["state"][3].update(more=torch.zeros(3)),
    "a step of several numbers": lambda s: s["state"][3].update(step=torch.zeros(4)),
    "the state of a parameter that does not exist": lambda s: s["state"].update({999: {}}),
    "a parameter twice": lambda s: s["param_groups"][0].update(
        params=[0] * len(s["param_groups"][0]["params"])
    ),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hostile_states_of_optimizers(name: str, optimizer: str, tmp_path: Path) -> None:
    """The fused kernels would read and write beyond a tensor that is too small."""
    model, built, content = resumable(tmp_path, optimizer)
    OPTIMIZERS[name](content["optimizer"])
    path = save(content, tmp_path)
    with pytest.raises(IntegrityError, match=f"{path}.*optimizer"):
        restore(model, built, load_checkpoint(path))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_intact_optimizer_is_restored(optimizer: str, tmp_path: Path) -> None:
    model, built, content = resumable(tmp_path, optimizer)
    for values in content["optimizer"]["state"].values():
        for value in values.values():
            value.fill_(3)
    restore(model, built, load_checkpoint(save(content, tmp_path)))
    tensors = [v for values in built.state.values() for v in values.values()]
    assert tensors
    assert all(bool((tensor == 3).all()) for tensor in tensors)


def test_a_hostile_average_is_refused(tmp_path: Path) -> None:
    model, built, content = resumable(tmp_path)
    content["trained"] = dict(content["model"])
    content["model"] = {**content["model"], "class_heads.0.bias": torch.zeros(())}
    path = save(content, tmp_path)
    with pytest.raises(IntegrityError, match=rf"{path}.*class_heads\.0\.bias"):
        restore(model, built, load_checkpoint(path))


def test_compressed_entries_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    path, bomb = save(payload(), tmp_path), tmp_path / "bomb.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(bomb, "w") as target:
        for info in source.infolist():
            content = source.read(info)
            target.writestr(info.filename, content, zipfile.ZIP_DEFLATED)
        target.writestr("archive/data/bomb", bytes(10**8), zipfile.ZIP_DEFLATED)
    with pytest.raises(IntegrityError, match="compressed"):
        read_payload(bomb)


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Change the pickle of a file, with correct CRCs."""
    target = path.with_name("changed.pt")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as archive:
        for info in source.infolist():
            content = source.read(info)
            is_pickle = info.filename.endswith("data.pkl")
            archive.writestr(info.filename, change(content) if is_pickle else content)
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
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    assert read_payload(rewritten(path, lambda p: p))["a"].tolist() == [0, 1, 2, 3]
    changed = rewritten(path, LIES[name])
    with pytest.raises(IntegrityError, match=re.escape(str(changed))):
        read_payload(changed)


def test_names_that_differ_by_case_only_are_refused(tmp_path: Path) -> None:
    """PyTorch takes the first, whichever is named."""
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(4.0)}, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x/DATA/0", bytes(1000))
    with pytest.raises(IntegrityError, match="twice"):
        read_payload(path)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(3, dtype=d) for d in (torch.float64, torch.bfloat16, torch.int8, torch.bool)]
    + [torch.zeros(0), torch.zeros(6)[1:4], torch.zeros(2, dtype=torch.complex64)],
    ids=str,
)
def test_tensors_of_each_type_are_read(tensor: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(
        {"a": tensor, "b": [tensor, 1.5, None, True, "text", 2**40, -1, (1, 2), set()]}, path
    )
    read = read_payload(path)
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["b"][0], tensor)


HEADER = b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'
OTHER_FORMATS = {  # torch.load reads safetensors, too; nothing reads ONNX
    "safetensors": len(HEADER).to_bytes(8, "little") + HEADER + bytes(16),
    "safetensors, a header of 2^63 bytes": (2**63 - 1).to_bytes(8, "little") + HEADER,
    "safetensors, 4 TB": HEADER.replace(b"4]", b"%d]" % 10**12).replace(
        b"16]", b"%d]" % (4 * 10**12)
    ),
    "safetensors, deep": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "ONNX": b"\x08\x0a\x12\x07pytorch\x3a\x80\x80\x80\x80\x08" + bytes(100),
    "ONNX, a graph of 2^63 bytes": b"\x3a" + b"\xff" * 9 + b"\x7f",
    "empty": b"",
    "half a zip": b"PK\x03\x04 half a zip",
    "a long string in a pickle": b"\x80\x02X\xff\xff\xff\x7f" + b"x" * 100,
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    content = OTHER_FORMATS[name]
    if name == "safetensors, 4 TB":
        content = len(content).to_bytes(8, "little") + content
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=str(path)) as caught:
        load_checkpoint(path)
    assert "weights_only" not in str(caught.value)  # without the advice to load it unsafely


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
