"""Read the graph and the description in an ONNX file of `ssdctl export`, which is untrusted.

`description` is what the export writes into `metadata_props`: one JSON value for each key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from ssdctl.checkpoint.format import MAX_CLASSES, MAX_COUNT, Count, Integer
from ssdctl.config.fields import BackboneName
from ssdctl.data.classes import ClassName, Name
from ssdctl.errors import IntegrityError, UsageError, missing_package

SUFFIX = ".onnx"
MAX_BYTES = (2 << 30) - 1  # of a protobuf message
MAX_DEPTH = 8  # graphs inside of nodes
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")  # operators inside of onnxruntime
PACKAGES = ("onnx", "onnxruntime")


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
    # Of the NMS in the graph; null without it.
    score_threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None
    nms_iou: Annotated[float, msgspec.Meta(ge=0, le=1)] | None

    @property
    def named_classes(self) -> list[ClassName]:
        """The classes with their category ids."""
        pairs = zip(self.category_ids, self.classes, strict=True)
        return [ClassName(number, name) for number, name in pairs]

    def as_metadata(self) -> dict[str, str]:
        """Return the entries of `metadata_props`."""
        return {
            name: msgspec.json.encode(value).decode()
            for name, value in msgspec.structs.asdict(self).items()
        }


class OnnxFile(NamedTuple):
    """The contents of a file."""

    graph: bytes
    description: OnnxDescription


def read_onnx(path: Path) -> OnnxFile:
    """Read a file of `ssdctl export --format onnx`.

    Raises:
        UsageError: There is no such file, or onnx is not installed.
        IntegrityError: It is damaged, too large, refers to other files or operators, or lacks the
            description of ssdctl.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        import onnx
    except ImportError:
        raise missing_package("onnx", *PACKAGES) from None
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
    return OnnxFile(content, _description(path, metadata))


def _refuse_references(model: Any, path: Path) -> None:
    """Raise ValueError unless the graph consists of onnxruntime's own operators and values.

    Weights in another file would let the graph read any file of the user.
    """
    if not model.graph.node:
        raise ValueError("it has no graph")
    if model.functions or model.training_info:
        raise ValueError("it has functions or training information")
    domains = {entry.domain for entry in model.opset_import}
    domains |= {node.domain for node in _nodes(model.graph)}
    if others := sorted(domains.difference(DOMAINS)):
        if "TRT" in others:
            raise UsageError(
                f"{path}: its NMS is TensorRT's plugin (--nms efficientnms); only TensorRT runs it",
                hint="run the file with TensorRT, or export the checkpoint with --nms onnx",
            )
        raise ValueError(f"operators of {', '.join(others)[:200]!r} are not onnxruntime's")
    if any(tensor.data_location or tensor.external_data for tensor in _tensors(model.graph)):
        raise ValueError("weights in another file are not read")


def _nodes(graph: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the nodes of a graph and of the graphs in its attributes."""
    if depth > MAX_DEPTH:
        raise ValueError("graphs are nested too deeply")
    for node in graph.node:
        yield node
        for inner in _graphs(node):
            yield from _nodes(inner, depth + 1)


def _graphs(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from attribute.graphs
        if attribute.HasField("g"):
            yield attribute.g


def _tensors(graph: Any) -> Iterator[Any]:
    """Yield the constants of a graph and of the graphs in its attributes."""
    nodes = list(_nodes(graph))
    for inner in (graph, *(inner for node in nodes for inner in _graphs(node))):
        yield from inner.initializer
        yield from _dense_parts(inner.sparse_initializer)
    for node in nodes:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            yield from _dense_parts((attribute.sparse_tensor, *attribute.sparse_tensors))


def _dense_parts(tensors: Iterable[Any]) -> Iterator[Any]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def _description(path: Path, metadata: dict[str, str]) -> OnnxDescription:
    """Return the description of the detector.

    Raises:
        IntegrityError: Parts are missing, of another type, or contradict each other.
    """
    missing = [name for name in OnnxDescription.__struct_fields__ if name not in metadata]
    if missing:
        raise IntegrityError(
            f"{path}: its metadata (metadata_props) lacks {', '.join(missing)}",
            hint="`ssdctl export CKPT --format onnx` writes them; ONNX files of other programs and "
            "of earlier versions of ssdctl cannot be read",
        )
    try:
        fields = {k: msgspec.json.decode(metadata[k]) for k in OnnxDescription.__struct_fields__}
        facts = msgspec.convert(fields, OnnxDescription)
        if facts.backbone not in get_args(BackboneName):
            raise ValueError(f"the backbone is {facts.backbone[:40]!r}")
        counts = {len(facts.classes), len(facts.category_ids)}
        if counts not in ({facts.num_classes - 1}, {0}):
            raise ValueError(
                f"{len(facts.classes)} classes and {len(facts.category_ids)} category ids, but "
                f"num_classes is {facts.num_classes} with the background"
            )
        if (facts.score_threshold is None) != (facts.nms_iou is None):
            raise ValueError("only one of score_threshold and nms_iou is set")
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{path}: damaged metadata: {error}") from None
    return facts
