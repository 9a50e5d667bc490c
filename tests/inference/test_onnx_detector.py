"""An ONNX file is used in place of its checkpoint, with the same detections; files of other programs,
damaged and hostile ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Result, run_cli

import ssdctl
from ssdctl.checkpoint.reader import load_network, read_checkpoint, read_model
from ssdctl.device import open_device
from ssdctl.inference.detector import Detector, open_detector

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.skipif(
    torch.__version__.startswith("2.6"), reason="torch 2.6 cannot export the network to ONNX"
)

Cli = Callable[..., Result]
THRESHOLD = 0.02  # the network is hardly trained: a low one leaves boxes to compare


@pytest.fixture(scope="session")
def onnx_file(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the default ONNX file of the tiny run. Read only."""
    path = tmp_path_factory.mktemp("onnx") / "ssd.onnx"
    result = run_cli(
        "export", checkpoint, "--format", "onnx", "--out", path, "--score-threshold", THRESHOLD
    )
    assert result.code == 0, result.err
    return path


@pytest.fixture
def edited(onnx_file: Path, tmp_path: Path) -> Callable[[Callable[[Any], object]], Path]:
    """Return a function that writes a changed copy of the file."""

    def edit(change: Callable[[Any], object]) -> Path:
        model = onnx.load(onnx_file)
        change(model)
        path = tmp_path / "changed.onnx"
        path.write_bytes(model.SerializeToString())
        return path

    return edit


def test_detections_of_all_formats(
    cli: Cli, checkpoint: Path, onnx_file: Path, shapes: Path, tmp_path: Path
) -> None:
    """`predict` and `evaluate` of the checkpoint, of safetensors, of push's folder, and of ONNX."""
    weights = tmp_path / "ssd.safetensors"
    assert cli("export", checkpoint, "--format", "safetensors", "--out", weights).code == 0
    pictures = sorted((shapes / "val2017").iterdir())[:3]
    predicted, scores = [], []
    for path in (checkpoint, weights, onnx_file):
        predictor = ssdctl.load(path, device="cpu", score=THRESHOLD)
        predicted.append(predictor.predict_many(pictures))
        result = cli("evaluate", path, "--data", shapes, "--device", "cpu", "--json",
                     "--score-threshold", THRESHOLD)  # fmt: skip
        assert result.code == 0, result.err
        scores.append(json.loads(result.out))
    for found, score in zip(predicted[1:], scores[1:], strict=True):
        for expected, actual in zip(predicted[0], found, strict=True):
            assert len(expected) == len(actual) > 0
            assert [d.name for d in actual] == [d.name for d in expected]
            np.testing.assert_allclose(
                [d.score for d in actual], [d.score for d in expected], atol=1e-3
            )
        assert score["AP"] == pytest.approx(scores[0]["AP"], abs=1e-3)
        assert abs(score["detections"] - scores[0]["detections"]) <= 2
        assert score["step"] == scores[0]["step"] == 3


def test_the_folder_of_push(cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pushed"
    from ssdctl.export.hub_folder import write_model_folder

    write_model_folder(
        read_checkpoint(checkpoint), folder, repo="a/b", license_id="mit", data_license=None, samples=0
    )  # fmt: skip
    common = ("--data", shapes, "--device", "cpu", "--limit", 4, "--json")
    a, b = (json.loads(cli("evaluate", p, *common).out) for p in (checkpoint, folder))
    assert (a["AP"], a["detections"]) == (b["AP"], b["detections"])


def test_thresholds(cli: Cli, onnx_file: Path, shapes: Path) -> None:
    """Those of the NMS in the graph: a higher score is applied, other values are refused."""
    picture = sorted((shapes / "val2017").iterdir())[0]
    many, few = (
        ssdctl.load(onnx_file, device="cpu", score=score).predict(picture) for score in (0.02, 0.2)
    )
    assert len(few) < len(many)
    assert few == [d for d in many if d.score > 0.2]
    for options in (["--score", 0.01], ["--nms-iou", 0.4]):
        result = cli("predict", onnx_file, picture, "--device", "cpu", *options)
        assert result.code == 2, result.err
        assert str(options[1]) in result.err
        assert "--nms none" in result.err


def test_files_of_other_programs_lack_the_description(
    cli: Cli, edited: Callable[..., Path], shapes: Path
) -> None:
    def clear(model: Any) -> None:
        del model.metadata_props[:]

    path = edited(clear)
    result = cli("evaluate", path, "--data", shapes)
    assert result.code == 5
    for name in ("classes", "category_ids", "input", "num_classes"):
        assert name in result.err
    assert "ssdctl export" in result.err


def set_metadata(key: str, value: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for entry in model.metadata_props:
            if entry.key == key:
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


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (set_metadata("classes", '["a"]'), "classes"),
        (set_metadata("classes", "[" * 5000), "metadata"),
        (set_metadata("category_ids", '["x"]'), "category_ids"),
        (set_metadata("num_classes", "1e9"), "num_classes"),
        (set_metadata("backbone", '"alexnet"'), "alexnet"),
        (set_metadata("input", '{"layout": "BCHW"}'), "layout"),
        (set_metadata("score_threshold", "null"), "score_threshold"),
        (external_weights, "another file"),
        (another_domain, "evil"),
        (another_input, "changed.onnx"),
        (lambda model: model.graph.node.pop(), "onnxruntime"),
        (lambda model: model.graph.ClearField("node"), "no graph"),
    ],
)
def test_damaged_and_hostile_files(
    cli: Cli, edited: Callable[..., Path], shapes: Path, change: Callable[[Any], object], subject: str
) -> None:  # fmt: skip
    picture = sorted((shapes / "val2017").iterdir())[0]
    result = cli("predict", edited(change), picture, "--device", "cpu")
    assert result.code == 5, result.err
    assert subject in result.err
    assert result.out == ""


def test_labels_outside_of_the_classes(cli: Cli, edited: Callable[..., Path], shapes: Path) -> None:
    """Fewer classes than the graph: its labels have no names."""

    def change(model: Any) -> None:
        set_metadata("num_classes", "2")(model)
        set_metadata("classes", '["ball"]')(model)
        set_metadata("category_ids", "[1]")(model)

    picture = sorted((shapes / "val2017").iterdir())[0]
    result = cli("predict", edited(change), picture, "--device", "cpu", "--score", 0.02)
    assert result.code == 5, result.err
    assert "label" in result.err


def test_not_onnx(cli: Cli, tmp_path: Path, shapes: Path) -> None:
    path = tmp_path / "x.onnx"
    for content in (b"", b"garbage" * 100):
        path.write_bytes(content)
        assert cli("evaluate", path, "--data", shapes).code == 5
    result = cli("evaluate", tmp_path / "absent.onnx", "--data", shapes)
    assert result.code == 2


def test_it_has_no_weights(cli: Cli, onnx_file: Path) -> None:
    """Nothing that needs weights accepts it."""
    for command in (
        ["export", onnx_file, "--format", "safetensors", "--out", "x.safetensors"],
        ["push", onnx_file, "hf://a/b", "--license", "mit"],
    ):
        result = cli(*command)
        assert result.code == 2, result.err
        assert "exported from" in result.err
    assert not Path("x.safetensors").exists()


def test_a_batch_of_any_size_gives_the_same(onnx_file: Path, checkpoint: Path) -> None:
    device = open_device("cpu")
    pixels = torch.randint(0, 256, (3, 300, 300, 3), dtype=torch.uint8)
    detector = open_detector(read_model(onnx_file), device)
    assert detector.score_threshold == THRESHOLD
    reference = Detector(
        device.place(load_network(read_checkpoint(checkpoint))).eval(),
        device,
        score_threshold=THRESHOLD,
    )
    for expected, actual in zip(reference(pixels), detector(pixels), strict=True):
        assert len(actual.scores) == len(expected.scores)
        torch.testing.assert_close(actual.scores, expected.scores, atol=1e-3, rtol=0)
