"""Read files of `ssdctl export` and `ssdctl push`, which are untrusted: ONNX and safetensors.

Both describe the network: an ONNX file in `metadata_props`, a `.safetensors` file in its metadata
or in `config.json` in the same folder. A description has one JSON value for each key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ssdctl.checkpoint.format import (
    FORMAT,
    MAX_CLASSES,
    MAX_COUNT,
    Architecture,
    ArchitectureFields,
    Count,
    Integer,
    ModelFile,
    NetworkWeights,
    OnnxGraph,
    Threshold,
    TilingFields,
    check_classes,
    check_thresholds,
    is_state,
    require_file,
)
from ssdctl.data.annotations import ClassName, Name
from ssdctl.errors import IntegrityError, UsageError, import_package
from ssdctl.files import msgspec_type, read_limited, reason_of

MAX_BYTES = (2 << 30) - 1  # protobuf's limit for a message
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # operators inside of onnxruntime
DAMAGED = (OSError, ValueError, RuntimeError, TypeError, KeyError)  # of a safetensors file
PACKAGES = ("onnx", "onnxruntime")
CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20
T = TypeVar("T", bound=msgspec.Struct)


class InputConvention(msgspec.Struct, forbid_unknown_fields=True):
    """What the input `images` contains: (B, 300, 300, 3) RGB values from 0 to 255."""

    name: Literal["images"] = "images"
    layout: Literal["BHWC"] = "BHWC"
    colors: Literal["RGB"] = "RGB"
    dtype: Literal["uint8"] = "uint8"
    size: Literal[300] = 300
    resize: Literal["bilinear, antialiased"] = "bilinear, antialiased"


class OnnxDescription(msgspec.Struct):
    """The metadata; other keys are for other programs."""

    format: Literal[1]
    backbone: str
    num_classes: Annotated[int, msgspec.Meta(ge=2, le=MAX_CLASSES)]  # with background
    classes: list[Name]  # in the order of the labels, from 1; empty if they have no names
    category_ids: list[Integer | None]
    input: InputConvention
    step: Count
    epoch: Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)]
    # The limits of the NMS in the graph; null without one.
    score_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    nms_iou: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    thresholds: list[Threshold] = []  # the scores of the best F1 of the classes; empty: not known
    tiling: TilingFields | None = None  # how the run saw images; null: only as a whole

    @property
    def named_classes(self) -> list[ClassName]:
        pairs = zip(self.category_ids, self.classes, strict=True)
        return [ClassName(number, name) for number, name in pairs]

    def as_metadata(self) -> dict[str, str]:
        return {
            name: msgspec.json.encode(value).decode()
            for name, value in msgspec.structs.asdict(self).items()
        }


def read_onnx(path: Path) -> OnnxGraph:
    """Read a file of `ssdctl export --format onnx`.

    Raises:
        UsageError: There is no such file, or onnx is not installed.
        IntegrityError: It is damaged, too large, refers to other files or operators, or lacks the
            description of ssdctl.
    """
    require_file(path)
    onnx = import_package("onnx", *PACKAGES)
    if path.stat().st_size > MAX_BYTES:
        raise IntegrityError(f"{path}: larger than {MAX_BYTES} bytes")
    content = path.read_bytes()
    try:
        model = onnx.load_model_from_string(content)
        _refuse_references(model, path)
        metadata = {entry.key: entry.value for entry in model.metadata_props}
    except UsageError:
        raise
    except Exception as error:  # protobuf's differ between its implementations
        raise IntegrityError(f"{path}: not an ONNX file, or a damaged one: {error}") from None
    try:
        facts = _onnx_description(metadata)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise IntegrityError(
            f"{path}: its metadata (metadata_props) does not describe an SSD300: {error!s:.300}",
            hint="`ssdctl export CKPT --format onnx` writes it; other ONNX files cannot be read",
        ) from None
    return OnnxGraph(
        path=path,
        architecture=Architecture(facts.backbone, "none", facts.num_classes),
        classes=facts.named_classes,
        thresholds=facts.thresholds,
        step=facts.step,
        epoch=facts.epoch,
        content=content,
        nms=(facts.score_threshold, facts.nms_iou),
        tiling=None if facts.tiling is None else facts.tiling.value,
    )


def _onnx_description(metadata: dict[str, str]) -> OnnxDescription:
    """Return the description in a file's metadata; raise ValueError if it contradicts itself."""
    facts = _from_metadata(metadata, OnnxDescription)
    if len(facts.classes) != len(facts.category_ids):
        raise ValueError("classes and category_ids have different lengths")
    check_thresholds(facts.thresholds, facts.classes)
    if facts.classes:
        check_classes(facts.named_classes, facts.num_classes)
    if (facts.score_threshold is None) != (facts.nms_iou is None):
        raise ValueError("only one of score_threshold and nms_iou is set")
    return facts


def _refuse_references(model: Any, path: Path) -> None:
    """Raise ValueError unless the graph consists of onnxruntime's own operators and values.

    Weights in another file would let the graph read any file of the user.
    """
    if not model.graph.node:
        raise ValueError("it has no graph")
    if model.functions or model.training_info:
        raise ValueError("it has functions or training information")
    domains = {entry.domain for entry in model.opset_import}
    for message in _messages(model):
        if message.DESCRIPTOR.name == "NodeProto":
            domains.add(message.domain)
        is_tensor = message.DESCRIPTOR.name == "TensorProto"
        if is_tensor and (message.data_location or message.external_data):
            raise ValueError("weights in another file are not read")
    if "TRT" in domains:
        raise UsageError(
            f"{path}: its NMS is TensorRT's plugin (--nms efficientnms); only TensorRT runs it",
            hint="run the file with TensorRT, or export the checkpoint with --nms onnx",
        )
    if others := sorted(domains.difference(DOMAINS)):
        raise ValueError(f"operators of {', '.join(others)[:200]!r} are not onnxruntime's")


def _messages(message: Any) -> Iterator[Any]:
    """Yield a message of protobuf and those in it: nodes, tensors and graphs inside of nodes.

    A parsed file is at most 100 levels deep.
    """
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from _messages(inner)


def _from_metadata(metadata: Mapping[str, str], kind: type[T]) -> T:
    """Return a description from one JSON text for each of its fields."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.name in metadata]
    return msgspec.convert(
        {name: msgspec.json.decode(metadata[name]) for name in names}, msgspec_type(kind)
    )


class NetworkDescription(msgspec.Struct, kw_only=True):
    """The part of `config.json` that is read back; other keys are for other programs."""

    format: Literal[1] = FORMAT
    architecture: ArchitectureFields
    classes: list[ClassName]
    step: Count = 0
    epoch: Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0.0
    thresholds: list[Threshold] = []
    tiling: TilingFields | None = None


def describe_network(model: ModelFile) -> dict[str, Any]:
    """Return the `NetworkDescription` of a file as plain data."""
    description = NetworkDescription(
        architecture=msgspec.convert(
            model.architecture._asdict(), msgspec_type(ArchitectureFields)
        ),
        classes=model.classes,
        step=model.step,
        epoch=model.epoch,
        thresholds=[*model.thresholds],
        tiling=None if model.tiling is None else TilingFields(*model.tiling),
    )
    facts: dict[str, Any] = msgspec.to_builtins(description)
    return facts


def read_safetensors(path: Path) -> NetworkWeights:
    """Read weights with their classes. Nothing names the run, so it cannot be resumed.

    Raises:
        UsageError: There is no such file, or safetensors is not installed.
        IntegrityError: It is damaged, or does not describe an SSD300.
    """
    require_file(path)
    safetensors = import_package("safetensors")
    try:
        # The sizes in the header are checked against the file before a tensor is allocated.
        with safetensors.safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            facts = _network_description(path, file.metadata() or {})
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it cannot be iterated
    except (safetensors.SafetensorError, *DAMAGED) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise IntegrityError(
            f"{path}: not a safetensors file, or a damaged one: {reason}"
        ) from None
    if not is_state(state):
        raise IntegrityError(f"{path}: its weights are not dense tensors of real numbers")
    return NetworkWeights(
        path=path,
        model=state,
        architecture=Architecture(*msgspec.structs.astuple(facts.architecture)),
        classes=facts.classes,
        thresholds=facts.thresholds,
        step=facts.step,
        epoch=facts.epoch,
        tiling=None if facts.tiling is None else facts.tiling.value,
    )


def _network_description(path: Path, metadata: dict[str, str]) -> NetworkDescription:
    """Return the file's own description, else that of `config.json`."""
    source = path
    try:
        if "architecture" in metadata:
            metadata.pop("format", None)  # other tools write `pt`
            facts = _from_metadata(metadata, NetworkDescription)
        else:
            source = path.with_name(CONFIG_FILE)
            content = read_limited(source, MAX_CONFIG_BYTES)
            facts = msgspec.json.decode(content, type=msgspec_type(NetworkDescription))
        check_thresholds(facts.thresholds, facts.classes)
        if facts.classes:  # a third-party checkpoint may have no names
            check_classes(facts.classes, facts.architecture.num_classes)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise IntegrityError(
            f"{source}: not the description of an SSD300: {reason_of(error)[:300]}",
            hint="expected a file of `ssdctl export --format safetensors`, or the folder or "
            "hf:// repository of `ssdctl push`",
        ) from None
    return facts
