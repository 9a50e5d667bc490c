"""Files that may stand for a checkpoint, but are not torch.save's: safetensors and ONNX."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fuzz.mutations import mutated_bytes
from fuzz.runner import Target, file_target


@contextmanager
def safetensors(folder: Path) -> Iterator[Target]:
    """Files of `export --format safetensors`: the header in JSON, the metadata, the tensors."""
    pytest.importorskip("safetensors")
    import torch
    from checkpoint.test_hostile import payload

    from ssdctl.checkpoint.file import load_checkpoint, load_network
    from ssdctl.exporting.formats import export

    torch.save(payload(), folder / "first.pt")
    path = folder / "x.safetensors"
    export(load_checkpoint(folder / "first.pt"), "safetensors", path)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, tensors = whole[8:end], whole[end:]
    words = (b'"dtype":"F64"', b'"shape":[', b'"data_offsets":[0,', b"__metadata__", b"},", b":[]")

    def joined(changed: bytes) -> bytes:
        """Return a file whose length of the header is correct, so that the header is parsed."""
        return len(changed).to_bytes(8, "little") + changed + tensors

    inputs = mutated_bytes([header], words).map(joined)
    yield file_target(path, inputs, lambda: load_network(load_checkpoint(path)))


@contextmanager
def onnx(folder: Path) -> Iterator[Target]:
    """A small graph with the description of an exported network."""
    package = pytest.importorskip("onnx")
    from inference.test_onnx_detector import FACTS, GRAPH

    from ssdctl.checkpoint.exported import read_onnx

    model = package.parser.parse_model(GRAPH.replace("BATCH", "batch"))
    package.helper.set_model_props(model, FACTS.as_metadata())
    path = folder / "x.onnx"
    words = (b"\x0a\x80\x80\x80\x80\x08", b"location", b"../../etc/passwd", b"\x70\x01", b"TRT")
    inputs = mutated_bytes([model.SerializeToString()], words)
    yield file_target(path, inputs, lambda: read_onnx(path))
