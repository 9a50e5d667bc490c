"""Files for other runtimes give PyTorch's boxes and AP there, for any batch; a wrong one is not
written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
    assert result.code == 0, result.err
    assert "agrees with PyTorch on 5 images" in result.err
    return Path(out)


def run(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    """Run an ONNX file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": images}), strict=True))


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
    """The node of EfficientNMS_TRT is as documented."""
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
    result = cli("export", checkpoint, "--out", "x.out", "--format", *options.split())
    assert result.code == 2, result.err
    assert subject in result.err
    assert not Path("x.out").exists()


@pytest.mark.parametrize(("kind", "out"), [("openvino", "ssd.xml"), ("onnx", "ssd.onnx")])
def test_without_the_extra(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str, out: str
) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    result = cli("export", checkpoint, "--format", kind, "--out", out)
    assert result.code == 2, result.err
    assert f"pip install {kind}" in result.err
    assert not Path(out).exists()


@pytest.mark.parametrize("is_prepared", [True, False])
def test_images_to_compare_on(cli: Cli, shapes: Path, tmp_path: Path, is_prepared: bool) -> None:
    """The dataset's, anywhere in it; its store's if only that is left; else generated ones."""
    root = tmp_path / "root"
    (root / "photos").mkdir(parents=True)
    shutil.copytree(shapes / "val2017", root / "photos/deep")
    document = json.loads((shapes / "annotations/instances_val2017.json").read_text())
    for image in document["images"]:
        image["file_name"] = f"deep/{image['file_name']}"
    (root / "val.json").write_text(json.dumps(document))
    (root / "dataset.toml").write_text('[val]\nimages = "photos"\nannotations = "val.json"\n')
    if is_prepared:
        result = cli("prepare", "--data", root)
        assert result.code == 0, result.err
        assert images_of(root, root / "prepared")[1] == str(root)
    shutil.rmtree(root / "photos")
    pixels, source = images_of(root, root / "prepared")
    assert pixels.shape == (5, 300, 300, 3)
    assert source == (str(root) if is_prepared else "generated shapes")


def test_weights_that_are_nan_are_named(cli: Cli, checkpoint: Path) -> None:
    payload = torch.load(checkpoint, weights_only=True)
    payload["model"]["backbone.conv1.weight"].fill_(float("nan"))
    torch.save(payload, "nan.pt")
    result = cli("export", "nan.pt", "--format", "onnx", "--batch", 1, "--out", "x.onnx")
    assert (result.code, "NaN" in result.err) == (7, True)


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
    assert result.code == 5, result.err
    assert "differs from PyTorch" in result.err
    assert not list(Path().glob("*x.onnx*"))


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
