"""ONNX files in place of checkpoints. The graphs are small and return constants."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Cli

import ssdctl
from ssdctl.checkpoint.exported import InputConvention, OnnxDescription
from ssdctl.checkpoint.file import read_model
from ssdctl.device import open_device
from ssdctl.errors import UsageError
from ssdctl.inference.predict import open_detector

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

Write = Callable[..., Path]
FACTS = OnnxDescription(
    format=1,
    backbone="tiny",
    num_classes=4,
    classes=["ball", "brick", "cone"],
    category_ids=[1, 2, 5],
    input=InputConvention(),
    step=3,
    epoch=0.5,
    score_threshold=0.02,
    nms_iou=0.5,
)
GRAPH = """
    <ir_version: 10, opset_import: ["" : 18]>
    constants (uint8[BATCH, 300, 300, 3] images)
        => (float[BATCH, 3, 4] boxes, float[BATCH, 3] scores, int64[BATCH, 3] labels, int64[BATCH] count)
    <float[1, 3] weights = {0.9, 0.5, 0.1}>
    {
        batch = Shape <end = 1> (images)
        three = Constant <value = int64[1] {3}> ()
        four = Constant <value = int64[1] {4}> ()
        table = Concat <axis = 0> (batch, three)
        box_table = Concat <axis = 0> (table, four)
        box = Constant <value = float[4] {0.25, 0.25, 0.5, 0.75}> ()
        boxes = Expand (box, box_table)
        scores = Expand (weights, table)
        all_labels = Constant <value = int64[3] {1, 3, 0}> ()
        labels = Expand (all_labels, table)
        two = Constant <value = int64[1] {2}> ()
        count = Expand (two, batch)
    }
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a changed copy of the graph."""

    def write(change: Callable[[Any], object] = lambda model: None, batch: str = "batch") -> Path:
        model = onnx.parser.parse_model(GRAPH.replace("BATCH", batch))
        onnx.helper.set_model_props(model, FACTS.as_metadata())
        change(model)
        path = tmp_path / "changed.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return write


def test_thresholds(cli: Cli, write: Write, image_file: Path) -> None:
    """Those of the NMS in the graph: a higher score is applied, other values are refused."""
    path = write()
    many, few = (ssdctl.load(path, device="cpu", score=s).predict(image_file) for s in (0.02, 0.6))
    found = [(d.name, d.category_id, round(d.score, 3)) for d in many]
    assert found == [("ball", 1, 0.9), ("cone", 5, 0.5)]
    assert [d.name for d in few] == ["ball"]
    for options in (["--score", 0.01], ["--nms-iou", 0.4]):
        result = cli("predict", path, image_file, "--device", "cpu", *options)
        result.expect(2, str(options[1]))
        assert options[0] != "--score" or f"give {FACTS.score_threshold} or more" in result.err
    with pytest.raises(UsageError, match="precision"):
        ssdctl.load(path, device="cpu", precision="bf16")
    settings = 'precision = "bf16"\nnms_iou = 0.4\nscore = 0.01'
    Path("ssdctl.toml").write_text(f"[predict]\n{settings}")  # for other networks
    assert cli("predict", path, image_file, "--device", "cpu").expect(0).out.count("ball") == 1


@pytest.mark.parametrize("batch", ["batch", "1", "2", "4"])
def test_batches(write: Write, batch: str) -> None:
    """Three images, in batches of the graph's size; the last one is filled."""
    detector = open_detector(read_model(write(batch=batch)), open_device("cpu"))
    assert (detector.score_threshold, detector.nms_iou) == (0.02, 0.5)
    found = detector.finish(detector.forward(torch.zeros((3, 300, 300, 3), dtype=torch.uint8)))
    assert [len(image.scores) for image in found] == [2, 2, 2]


def metadata(key: str, value: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        entry = next(e for e in model.metadata_props if e.key == key)
        entry.value = value

    return change


def external_weights(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../secret"


def another_domain(model: Any) -> None:
    model.graph.node[0].domain = "evil"


def another_input(model: Any) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 512


def many_labels(model: Any) -> None:
    labels = next(n for n in model.graph.node if n.output[0] == "all_labels").attribute[0].t
    labels.CopyFrom(onnx.numpy_helper.from_array(np.array([1, 4, 0])))


def infinite_scores(model: Any) -> None:
    weights = np.array([[np.inf, 0.5, 0.1]], np.float32)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "weights"))


@pytest.mark.parametrize(
    ("change", "code", "subject"),
    [  # more: fuzz/targets.py
        (lambda model: model.ClearField("metadata_props"), 5, "metadata"),  # another program's
        (metadata("classes", '["a"]'), 5, "classes"),
        (metadata("backbone", '"alexnet"'), 2, "not installed"),
        (external_weights, 5, "another file"),
        (another_domain, 5, "evil"),
        (another_input, 5, "changed.onnx"),
        (many_labels, 5, "label"),
        (infinite_scores, 7, "NaN or infinite"),
    ],
)
def test_damaged_and_hostile_files(
    cli: Cli, write: Write, image_file: Path, change: Callable[[Any], object], code: int, subject: str
) -> None:  # fmt: skip
    result = cli("predict", write(change), image_file, "--device", "cpu").expect(code, subject)
    assert result.out == ""


def test_it_has_no_weights(cli: Cli, write: Write) -> None:
    path = write()
    for command in (
        ["export", path, "--format", "safetensors", "--out", "x.safetensors"],
        ["push", path, "hf://a/b", "--license", "mit"],
    ):
        cli(*command).expect(2, path.name)
    assert not Path("x.safetensors").exists()
