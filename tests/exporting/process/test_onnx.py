"""An exported ONNX file gives PyTorch's boxes and AP in onnxruntime, for any batch; a wrong one is not
published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Cli

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.errors import IntegrityError
from ssdctl.exporting import graphs
from ssdctl.exporting.deployed import Deployed, Deployment, Reference, images_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

THRESHOLD = 0.02  # the network is hardly trained: a low one leaves boxes to compare


@pytest.mark.slow
def test_the_same_scores(cli: Cli, checkpoint: Path, shapes: Path) -> None:
    """`evaluate` scores the ONNX files and safetensors as it scores the checkpoint."""
    files = [checkpoint, Path("ssd.onnx"), Path("ssd.safetensors"), Path("raw.onnx")]
    for kind, file, *options in (
        ("onnx", files[1], "--score-threshold", THRESHOLD),
        ("safetensors", files[2]),
        ("onnx", files[3], "--raw"),
    ):
        result = cli("export", checkpoint, "--format", kind, "--out", file, *options)
        assert result.code == 0, result.err
    figures = []
    for file in files:
        result = cli("evaluate", file, "--data", shapes, "--device", "cpu", "--json",
                     "--score-threshold", THRESHOLD)  # fmt: skip
        assert result.code == 0, result.err
        figures.append(json.loads(result.out))
    for other in figures[1:]:
        assert other["AP"] == pytest.approx(figures[0]["AP"], abs=1e-3)
        assert abs(other["detections"] - figures[0]["detections"]) <= 2
    assert figures[1]["step"] == figures[0]["step"] == 3


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
    result = cli("export", "nan.pt", "--format", "onnx", "--out", "x.onnx")
    assert (result.code, "NaN" in result.err) == (7, True)


def test_a_file_that_differs_is_not_published(
    cli: Cli, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
@pytest.mark.parametrize("difference", [0.1, float("nan")])
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
