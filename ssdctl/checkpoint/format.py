"""The format of checkpoints: the keys of a file, their types, and the file itself.

A checkpoint is a zip of stored entries that `torch.save` wrote: the dictionary `Payload` of a run,
or `NetworkPayload` of a network without one. It is an untrusted file: a few bytes of it can
describe a tensor, a network or a number of any size. Here everything is bound to the bytes that the
file really has.
"""

from __future__ import annotations

import errno
import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from ssdctl.config.fields import LARGEST_INT, MIN_TILE, Tiling
from ssdctl.data.annotations import ClassName
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.files import disk_error, msgspec_type
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import BACKBONES
from ssdctl.runtime.safe_text import counted, listed

FORMAT: Final = 1
# How the file of a network without a run begins: the first keys of the dictionary, one of the
# architecture's, and nowhere one that only a run's checkpoint has.
BEGINNING = (
    r"(?s)PK.{28}[^/]+/data\.pkl.{,99}format.{4}X.{4}model"
    r"(?!.*X\x0c\0\0\0samples_seen).*X\n\0\0\0extra_norm"
)
MAX_CLASSES = 100_000
MAX_COUNT = 2**53  # exact as a float
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHOWN = 6  # differences named in a message

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Integer = Annotated[int, msgspec.Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
Setting = Annotated[int, msgspec.Meta(ge=-LARGEST_INT, le=LARGEST_INT)]
Threshold = Annotated[float, msgspec.Meta(ge=0, le=1)] | None  # None: not known for the class
Scalar = bool | Setting | float | str | None
Shape = tuple[int, ...]


class Architecture(NamedTuple):
    """The parameters that build the network of a checkpoint."""

    backbone: str
    extra_norm: str
    num_classes: int  # with background


class ArchitectureFields(msgspec.Struct, forbid_unknown_fields=True):
    backbone: str
    extra_norm: Literal["none", "batch"]
    num_classes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CLASSES)]


class TilingFields(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, msgspec.Meta(ge=MIN_TILE, le=MAX_COUNT)]  # pixels
    overlap: Annotated[float, msgspec.Meta(ge=0, le=0.9)]  # fraction of a tile

    @property
    def value(self) -> Tiling:
        return Tiling(self.size, self.overlap)


class ParameterGroup(msgspec.Struct):
    params: list[Count]


class OptimizerFields(msgspec.Struct):
    state: dict[Count, dict[str, Any]]
    param_groups: list[ParameterGroup]


class NetworkFields(msgspec.Struct, kw_only=True):
    """What the dictionary of every checkpoint has. Its tensors are checked by `read`."""

    format: Literal[1] = FORMAT
    model: dict[str, Any]  # the weights to evaluate
    architecture: ArchitectureFields
    classes: list[ClassName]  # label = index + 1; ids are COCO's
    thresholds: list[Threshold] = []  # the scores of the best F1 of the classes; empty: not known


class NetworkPayload(NetworkFields, kw_only=True, forbid_unknown_fields=True):
    """The dictionary of a network without a run."""

    tiling: TilingFields | None = None  # how it sees images; None: only as a whole


class Payload(NetworkFields, kw_only=True):
    """The dictionary of a run's checkpoint."""

    trained: dict[str, Any] | None  # the weights to resume from, if `model` is an average
    config: dict[str, Scalar | list[Scalar]]  # the settings that explain the result, by path
    step: Count
    samples_seen: Count
    images: AtLeastOne  # per epoch
    global_batch: AtLeastOne  # samples per step
    best_ap: Annotated[float, msgspec.Meta(ge=-1, le=1)] | None
    optimizer: OptimizerFields
    # Batch norm's statistics of each rank, where `model` has their average.
    rank_statistics: list[list[Any]] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelFile:
    """What every file of a detector describes."""

    path: Path
    architecture: Architecture
    classes: list[ClassName]
    thresholds: Sequence[float | None] = ()  # scores of the best F1 of the classes, if known
    step: int = 0
    epoch: float = 0.0
    tiling: Tiling | None = None  # how the run saw images; None: only as a whole

    def __post_init__(self) -> None:
        """Raise UsageError unless the backbone is built in, or a plugin that is installed."""
        if self.architecture.backbone not in plugins.names(BACKBONES):
            raise UsageError(
                f"{self.path}: its backbone {self.architecture.backbone!r:.100} is not installed",
                hint=f"install the package that has it as an entry point of {BACKBONES.group}",
            )

    @property
    def run_settings(self) -> Mapping[str, Any] | None:
        """The settings of the run by path; None if the file is not a run's checkpoint."""
        return None

    def has_ids_as_labels(self, classes: Sequence[ClassName]) -> bool:
        """Return whether a file without class names has the ids of these classes as labels.

        That is a habit of torchvision's users. Else label N is the Nth class.
        """
        ids, count = [c.id or 0 for c in classes], self.architecture.num_classes - 1
        is_torchvisions = not self.classes and self.architecture.backbone == "vgg16"
        return is_torchvisions and min(ids, default=0) > 0 and max(ids) == count


@dataclass(frozen=True, eq=False, kw_only=True)
class OnnxGraph(ModelFile):
    """An ONNX file of `ssdctl export`."""

    content: bytes
    nms: tuple[float | None, float | None]  # score threshold and IoU of the NMS in the graph


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkWeights(ModelFile):
    """Weights under ssdctl's names: of `SSD300.save`, another program, an export, or a run."""

    model: dict[str, Tensor]
    third_party: str | None = None  # the program that wrote the file; None if ssdctl did

    @classmethod
    def read(cls, path: Path, payload: Any) -> NetworkWeights:
        """Return the network in a dictionary; raise ValueError if it is not one."""
        fields = msgspec.convert(payload, msgspec_type(NetworkPayload))
        _check_network(fields)
        tiling = None if fields.tiling is None else fields.tiling.value
        return cls(path=path, model=payload["model"], tiling=tiling, **_network_of(fields))

    def payload(self) -> dict[str, Any]:
        """Return the dictionary that `read` takes. Its tensors are the checkpoint's own."""
        return self._payload(NetworkPayload)

    def _payload(self, fields: type[msgspec.Struct]) -> dict[str, Any]:
        own = {
            "format": FORMAT,
            "architecture": self.architecture._asdict(),
            "classes": msgspec.to_builtins(self.classes),
            "thresholds": list(self.thresholds),
            "tiling": self.tiling and self.tiling._asdict(),
        }
        names = fields.__struct_fields__
        return {name: own[name] if name in own else getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint(NetworkWeights):
    """The weights of a run with all that it continues from; `Payload` describes the fields."""

    config: Mapping[str, Any]
    optimizer: dict[str, Any]
    samples_seen: int
    images: int
    global_batch: int
    best_ap: float | None
    trained: dict[str, Tensor] | None = None
    rank_statistics: list[list[Tensor]] | None = None

    @property
    def run_settings(self) -> Mapping[str, Any]:
        return self.config

    @classmethod
    def read(cls, path: Path, payload: Any) -> Checkpoint:
        """Return the checkpoint in a dictionary; raise ValueError if it is not one."""
        fields = msgspec.convert(payload, msgspec_type(Payload))
        _check_fields(fields)
        return cls(
            path=path,
            model=payload["model"],
            trained=payload["trained"],
            **_network_of(fields),
            config=fields.config,
            step=fields.step,
            epoch=fields.step * fields.global_batch / fields.images,
            tiling=_tiling(fields.config),
            samples_seen=fields.samples_seen,
            images=fields.images,
            global_batch=fields.global_batch,
            best_ap=fields.best_ap,
            optimizer=payload["optimizer"],  # with the keys that only PyTorch knows
            rank_statistics=fields.rank_statistics,
        )

    def payload(self) -> dict[str, Any]:
        return self._payload(Payload)


def _network_of(fields: NetworkFields) -> dict[str, Any]:
    architecture = Architecture(*msgspec.structs.astuple(fields.architecture))
    thresholds = fields.thresholds
    return {"architecture": architecture, "classes": fields.classes, "thresholds": thresholds}


def _check_network(fields: NetworkFields) -> None:
    check_classes(fields.classes, fields.architecture.num_classes)
    check_thresholds(fields.thresholds, fields.classes)
    if not is_state(fields.model):
        raise ValueError("model: not a state dict of dense tensors")


def _check_fields(fields: Payload) -> None:
    """Raise ValueError if a value, or a tensor, is not what its type says."""
    for key in ("data.root", "data.store"):
        value = fields.config.get(key)
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise ValueError(f"config: {key} is not a path")
    _check_network(fields)
    if not is_state(fields.trained or {}):
        raise ValueError("trained: not a state dict of dense tensors")
    if not all(is_plain_tensor(t) for rank in fields.rank_statistics or () for t in rank):
        raise ValueError("rank_statistics: not dense tensors")
    for values in fields.optimizer.state.values():
        if not all(is_plain_tensor(v) for v in values.values() if isinstance(v, Tensor)):
            raise ValueError("optimizer: a tensor is not dense numbers")


def _tiling(config: Mapping[str, Any]) -> Tiling | None:
    facts = {"size": config.get("data.tile"), "overlap": config.get("data.tile_overlap")}
    return msgspec.convert(facts, msgspec_type(TilingFields)).value if facts["size"] else None


def check_classes(classes: Sequence[ClassName], num_classes: int) -> None:
    """Raise ValueError if the classes are not those of a network of `num_classes` outputs."""
    if len(classes) + 1 != num_classes:
        raise ValueError(
            f"{counted(len(classes), 'class')}, but architecture.num_classes is {num_classes} "
            "with the background"
        )
    if any(c.id is not None and abs(c.id) > MAX_COUNT for c in classes):
        raise ValueError("classes: an id is out of bounds")


def check_thresholds(thresholds: Sequence[object], classes: Sequence[object]) -> None:
    """Raise ValueError unless there are as many thresholds as classes, or none."""
    if thresholds and len(thresholds) != len(classes):
        raise ValueError(f"{len(thresholds)} thresholds of {len(classes)} classes")


def is_state(value: object) -> bool:
    """Return whether a value is a state dict of plain tensors."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_plain_tensor(tensor) for name, tensor in value.items()
    )


def is_plain_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor of real numbers that are all in the file.

    Tensors that repeat few numbers by a stride of 0 are not: they would grow when copied.
    """
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and (value.is_floating_point() or value.dtype in INTEGERS)
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def check_zip(path: Path) -> None:
    """Check that a file is a complete zip of stored entries with correct CRCs, and that its
    tensors are as large as they are described.

    Raises:
        IntegrityError: It is not; or its entries are larger than the file.
        DiskError: It cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
                raise zipfile.BadZipFile("it has compressed entries, which torch.save never writes")
            if sum(max(e.file_size, e.compress_size) for e in entries) > path.stat().st_size:
                raise zipfile.BadZipFile("its entries are larger than the file")
            if not any(e.filename.endswith("data.pkl") for e in entries):
                raise zipfile.BadZipFile("torch.save did not write it")
            if (damaged := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the CRC of {damaged} is wrong")
            _check_storages(archive)
    except Exception as error:  # zipfile raises a dozen kinds on a broken directory
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise disk_error(error, path, "reading") from None
        raise IntegrityError(
            f"{path}: not a checkpoint, or a damaged one: {error}",
            hint="an earlier one may be intact: look in the run's checkpoints/",
        ) from None


def require_file(path: Path) -> None:
    """Raise UsageError unless the file of a checkpoint exists."""
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder, not a checkpoint",
            hint=f"name a file in it, such as {path / 'checkpoints' / 'best.pt'}",
        )
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file",
            hint="a run keeps its checkpoints in RUN/checkpoints/ (best.pt, last.pt)",
        )


def compare_shapes(expected: Mapping[str, Shape], shapes: Mapping[str, Shape], path: Path) -> None:
    """Raise IntegrityError if a file's weights differ from a network's; name the first ones."""
    wrong = [f"missing {name}" for name in expected if name not in shapes]
    wrong += [f"unexpected {name}" for name in shapes if name not in expected]
    wrong += [
        f"{name} is {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    if wrong:
        raise IntegrityError(
            f"{path}: does not fit the network: {listed(wrong, SHOWN, '; ')}",
            hint="it may belong to another --backbone, --extra-norm or dataset",
        )


ITEM_BYTES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


def _check_storages(archive: zipfile.ZipFile) -> None:
    """Compare the lengths of tensors that the pickle states with the records that hold the bytes.

    Before version 2.10 or so, PyTorch does not, and reads beyond the end of its memory.

    Raises:
        zipfile.BadZipFile: A storage is larger than its record, or is not described as torch.save
            does it; a name occurs twice.
        Exception: Of any kind, if the pickle is damaged.
    """
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    if len({name.lower() for name in sizes}) < len(archive.infolist()):  # as PyTorch compares them
        raise zipfile.BadZipFile("a name occurs twice in it")
    prefix = next(iter(sizes)).partition("/")[0]
    reader = _StorageReader(archive.read(f"{prefix}/data.pkl"))
    reader.load()
    for kind, storage, key, _, length in reader.storages:
        is_described = isinstance(storage, type) and type(key) is str and type(length) is int
        item_bytes = ITEM_BYTES.get(storage.__name__.removesuffix("Storage")) if is_described else 0
        size = sizes.get(f"{prefix}/data/{key}")
        if kind != "storage" or not item_bytes or size is None or length * item_bytes > size:
            raise zipfile.BadZipFile(f"its tensor {key!r:.80} is not in the file as described")


class _Inert:
    """Stands for any object of a pickle: it can be made and filled, and does nothing."""

    def __new__(cls, *_: object) -> _Inert:
        return super().__new__(cls)

    def ignore(self, *_: object) -> None:
        """Take what a pickle fills an object with."""

    __init__ = __setstate__ = __setitem__ = append = extend = add = ignore


class _StorageReader(pickle._Unpickler):  # C's would allocate a memo of any size
    """Lists the storages that a pickle refers to, without building any of its objects."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.storages: list[Any] = []

    def find_class(self, module: str, name: str) -> type[_Inert]:
        return type(name, (_Inert,), {})

    def persistent_load(self, description: Any) -> _Inert:
        self.storages.append(description)
        return _Inert()
