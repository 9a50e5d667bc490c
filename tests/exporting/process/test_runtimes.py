"""Files for other runtimes; test_random_exports.py compares their outputs with PyTorch's."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli
from pages import blocks
from PIL import Image

import ssdctl
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.errors import IntegrityError
from ssdctl.exporting import graphs
from ssdctl.exporting.deployed import Deployed, Deployment, Reference, images_of

THRESHOLD = 0.02  # the network is hardly trained: a low one leaves boxes to compare
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def images(shapes: Path) -> np.ndarray:
    return images_of(shapes, shapes / "prepared")[0][:4]


def exported(cli: Cli, checkpoint: Path, out: str, *options: object) -> Path:
    result = cli("export", checkpoint, "--format", "onnx", "--out", out, *options)
    result.expect(0, "agrees with PyTorch on 5 images")
    return Path(out)


@pytest.mark.slow(in_ci=True)
def test_the_documented_program_for_opencv(cli: Cli, checkpoint: Path, images: np.ndarray) -> None:
    """OpenCV 4 opens a file without NMS, and its own NMS leaves the detections of `predict`."""
    pytest.importorskip("cv2")
    (program,) = (b.text for b in blocks(DOCS / "export.md") if b.mark == "file: detect.py")
    Path("detect.py").write_text(program)
    Image.fromarray(images[0]).save("photo.png")  # 300 x 300, so that no resizing differs
    model = exported(cli, checkpoint, "x.onnx", "--nms", "none")
    command = [sys.executable, "detect.py", model, "photo.png", str(THRESHOLD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = np.array([line.split() for line in done.stdout.splitlines()], float)
    expected = ssdctl.load(checkpoint, device="cpu", score=THRESHOLD).predict("photo.png")
    assert len(expected) == 200  # the best of the image; OpenCV keeps those of each class
    same = (
        (found[:, None, 0] == expected.labels)
        & (np.abs(found[:, None, 1] - expected.scores) < 1e-3)
        & (np.abs(found[:, None, 2:] - expected.boxes).max(axis=2) < 0.3)
    )
    assert same.any(axis=0).mean() >= 0.97  # at an overlap of almost 0.5, rounding decides
    assert (found[:, 1] > expected.scores.min()).sum() <= 1.02 * len(expected)


# The attributes and outputs that the documentation of TensorRT's plugin lists.
PLUGIN_ATTRIBUTES = {
    "score_threshold": pytest.approx(0.3), "iou_threshold": pytest.approx(0.4),
    "max_output_boxes": 200, "background_class": -1, "score_activation": 0, "class_agnostic": 0,
    "box_coding": 0, "plugin_version": b"1",
}  # fmt: skip
PLUGIN_OUTPUTS = {  # type, dimensions after the batch
    "num_detections": ("INT32", [1]),
    "detection_boxes": ("FLOAT", [200, 4]),
    "detection_scores": ("FLOAT", [200]),
    "detection_classes": ("INT32", [200]),
}


@pytest.mark.parametrize("batch", [None, 2])
def test_the_plugins_node(checkpoint: Path, batch: int | None) -> None:
    onnx = pytest.importorskip("onnx")
    size = str(batch or "batch")
    decoder = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]> decoder '
        f"(float[{size}, 8732, 4] b, float[{size}, 5, 8732] s) => "
        f"(float[{size}, 8732, 4] all_boxes, float[{size}, 5, 8732] all_scores) "
        "{ all_boxes = Identity (b) all_scores = Identity (s) }"
    )
    source = load_checkpoint(checkpoint)
    deployment = Deployment(source, "efficientnms", batch, score_threshold=0.3, nms_iou=0.4)
    model = graphs.with_nms(decoder, deployment)
    node = next(node for node in model.graph.node if node.op_type == "EfficientNMS_TRT")
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert values == PLUGIN_ATTRIBUTES
    assert {type(value) for value in values.values()} == {float, int, bytes}
    assert {opset.domain for opset in model.opset_import} == {"", node.domain}
    for output, name in zip(model.graph.output, node.output, strict=True):
        tensor = output.type.tensor_type
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type)
        assert output.name == name
        assert (kind, [d.dim_value for d in tensor.shape.dim[1:]]) == PLUGIN_OUTPUTS[name]
        assert tensor.shape.dim[0].dim_value == (batch or 0)

    # Its inputs are the boxes (B, N, 4) and the scores, transposed to (B, N, C).
    boxes, scores = node.input
    (transposed,) = (n for n in model.graph.node if scores in n.output)
    assert (transposed.op_type, list(transposed.attribute[0].ints)) == ("Transpose", [0, 2, 1])
    assert [boxes, *transposed.input] == ["all_boxes", "all_scores"]


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        ("safetensors --nms none", "nms"),
        ("nvidia --fp16", "fp16"),
        ("onnx --nms none --raw", "raw"),
        ("pt2 --nms onnx", "none"),
        ("openvino --nms efficientnms", "openvino"),
        ("onnx --int8 --fp16", "int8"),
        ("openvino", "x.xml"),  # the suffix of the file
        ("safetensors --data .", "--data"),
        ("onnx --raw --nms-iou 0.4", "--nms-iou"),
        ("pt2 --score-threshold 0.2", "--score-threshold"),
    ],
)
def test_options_that_do_not_apply(cli: Cli, checkpoint: Path, options: str, subject: str) -> None:
    cli("export", checkpoint, "--out", "x.out", "--format", *options.split()).expect(2, subject)
    assert not Path("x.out").exists()


@pytest.mark.parametrize(("kind", "out"), [("openvino", "ssd.xml"), ("onnx", "ssd.onnx")])
def test_without_the_extra(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str, out: str
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    cli("export", checkpoint, "--format", kind, "--out", out).expect(2, f"pip install {kind}")
    assert not Path(out).exists()


def test_weights_that_are_nan_are_named(cli: Cli, checkpoint: Path) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    payload["model"]["backbone.conv1.weight"].fill_(float("nan"))
    torch.save(payload, "nan.pt")
    cli("export", "nan.pt", "--format", "onnx", "--batch", 1, "--out", "x.onnx").expect(7, "NaN")


def test_a_file_that_differs_is_not_published(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    wrong = """
        <ir_version: 10, opset_import: ["" : 18]>
        zeros (uint8[batch, 300, 300, 3] images) => (float[b, 4, 8732] offsets, float[b, 6, 8732] logits)
        {
            shape = Shape <end = 1> (images)
            box = Constant <value = int64[2] {4, 8732}> ()
            classes = Constant <value = int64[2] {6, 8732}> ()
            box_shape = Concat <axis = 0> (shape, box)
            class_shape = Concat <axis = 0> (shape, classes)
            offsets = ConstantOfShape (box_shape)
            logits = ConstantOfShape (class_shape)
        }
    """
    graph = onnx.parser.parse_model(wrong)
    monkeypatch.setattr(graphs, "network_graph", lambda deployment: graph)
    result = cli("export", checkpoint, "--format", "onnx", "--raw", "--out", "x.onnx")
    result.expect(5, "differs from PyTorch")
    assert not list(Path().glob("*x.onnx*"))


def test_boxes_of_many_images_in_size_are_compared_by_their_size() -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = ssdctl.SSD300("tiny", 6)
    model.box_heads[2].weight.data *= 30
    model.box_heads[2].bias.data += 60
    for nms in ("none", "onnx"):
        assert ssdctl.export(model, f"{nms}.onnx", format="onnx", nms=nms)["box_difference"] < 1e-3


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("difference", [0.005, float("nan")])  # fp16 weights may differ by 0.01
def test_each_difference_is_refused(checkpoint: Path, number: int, difference: float) -> None:
    deployment = Deployment(load_checkpoint(checkpoint), "none")
    network = Deployed(deployment)
    reference = Reference(deployment, np.zeros((2, 300, 300, 3), np.uint8), "x")
    changes = [0.0, 0.0]

    def run(images: np.ndarray) -> list[np.ndarray]:
        outputs = network(torch.from_numpy(images))
        return [(x + change).numpy() for x, change in zip(outputs, changes, strict=True)]

    assert max(reference.check_outputs(run).values()) < 1e-6
    changes[number] = difference
    with pytest.raises(IntegrityError):
        reference.check_outputs(run)


OBJECTS = 8  # per image


@pytest.fixture
def own_truth(cli: Cli, checkpoint: Path, dataset: Path) -> Path:
    """Return a dataset whose annotations are the network's best detections.

    The network is hardly trained; on this dataset its AP is high, and int8 changes it.
    """
    command = ["evaluate", checkpoint, "--data", dataset, "--device", "cpu"]
    assert cli(*command, "--detections", "found.json").code == 0
    found = defaultdict(list)
    for entry in sorted(json.loads(Path("found.json").read_text()), key=lambda e: -e["score"]):
        found[entry["image_id"]].append(entry)
    path = dataset / "annotations/instances_val2017.json"
    best = [entry for entries in found.values() for entry in entries[:OBJECTS]]
    document = json.loads(path.read_text())
    document["annotations"] = [
        {**entry, "id": number, "area": entry["bbox"][2] * entry["bbox"][3], "iscrowd": 0}
        for number, entry in enumerate(best, 1)
    ]
    path.write_text(json.dumps(document))
    return dataset


@pytest.mark.slow
def test_int8(cli: Cli, checkpoint: Path, own_truth: Path) -> None:
    """AP, size and latency before and after; too large a loss is refused."""
    onnx = pytest.importorskip("onnx")
    options = ("--data", own_truth, "--format", "onnx", "--int8", "--calibrate", 8, "--json")
    refused = cli("export", checkpoint, *options, "--out", "x.onnx", "--max-ap-loss", 0)
    refused.expect(5, "lowers the AP", "--max-ap-loss")
    assert not list(Path().glob("*x.onnx*"))

    Path("ssdctl.toml").write_text('[evaluate]\nsplit = "train"\nprecision = "bf16"\n')
    result = cli("export", checkpoint, *options, "--out", "x.onnx", "--max-ap-loss", 1).expect(0)
    assert "model.onnx" not in result.err  # a temporary file
    metrics = json.loads(result.out)
    before, after = metrics["before"], metrics["after"]
    assert before["ap"] > 0.3  # below 1: the detections that were left out count as wrong
    assert after["ap"] < before["ap"]
    assert after["size"] < before["size"]
    assert min(before["latency_ms"], after["latency_ms"]) > 0
    assert f"AP {before['ap']:.4f}" in result.err
    assert f"AP {after['ap']:.4f}" in result.err
    shown = ("--split", "val", "--device", "cpu", "--json")
    scored = cli("evaluate", "x.onnx", "--data", own_truth, *shown).expect(0)
    assert json.loads(scored.out)["AP"] == pytest.approx(after["ap"], abs=1e-3)

    model = onnx.load("x.onnx")
    domains = [entry.domain for entry in model.opset_import]
    assert len(domains) == len(set(domains))
    makers = {name: node for node in model.graph.node for name in node.output}
    convolutions = [node for node in model.graph.node if node.op_type == "Conv"]
    is_int8 = [
        makers[n.input[1]].op_type == "DequantizeLinear" if n.input[1] in makers else False
        for n in convolutions
    ]
    assert sum(is_int8) == len(convolutions) - (12 if metrics["heads"] == "fp32" else 0)
    weight = next(w for w in model.graph.initializer if w.data_type == onnx.TensorProto.INT8)
    scales = next(n for n in model.graph.node if weight.name in n.input).input[1]
    scale = next(w for w in model.graph.initializer if w.name == scales)
    assert list(scale.dims) == [weight.dims[0]]  # per channel
