"""int8 files: AP, size and latency before and after; too large a loss is refused."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import Cli

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

OBJECTS = 8  # per image


@pytest.fixture
def own_truth(cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path) -> Path:
    """Return a dataset whose annotations are the network's best detections.

    The network is hardly trained; on this dataset its AP is high, and int8 changes it.
    """
    root = tmp_path / "data"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    result = cli(
        "evaluate", checkpoint, "--data", shapes, "--device", "cpu", "--detections", "found.json"
    )
    assert result.code == 0, result.err
    found = defaultdict(list)
    for entry in sorted(json.loads(Path("found.json").read_text()), key=lambda e: -e["score"]):
        found[entry["image_id"]].append(entry)
    path = root / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    sizes = {image["id"]: (image["width"], image["height"]) for image in document["images"]}
    document["annotations"] = []
    for image_id, entries in found.items():
        width, height = sizes[image_id]
        for number, entry in enumerate(entries[:OBJECTS]):
            left, top, w, h = entry["bbox"]
            right, bottom = min(left + w, width), min(top + h, height)
            left, top = max(left, 0), max(top, 0)
            box = [left, top, right - left, bottom - top]
            found_box = {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            names = {key: entry[key] for key in ("image_id", "category_id")}
            document["annotations"].append({**names, **found_box, "id": 100 * image_id + number})
    path.write_text(json.dumps(document))
    return root


@pytest.mark.slow
def test_int8(cli: Cli, checkpoint: Path, own_truth: Path) -> None:
    options = ("--data", own_truth, "--format", "onnx", "--int8", "--calibrate", 8, "--json")
    refused = cli("export", checkpoint, *options, "--out", "x.onnx", "--max-ap-loss", 0)
    assert refused.code == 5, refused.err
    assert "lowers the AP" in refused.err
    assert "--max-ap-loss" in refused.err
    assert not list(Path().glob("*x.onnx*"))

    result = cli("export", checkpoint, *options, "--out", "x.onnx", "--max-ap-loss", 1)
    assert result.code == 0, result.err
    assert "model.onnx" not in result.err  # a temporary file
    metrics = json.loads(result.out)
    before, after = metrics["before"], metrics["after"]
    assert before["ap"] > 0.3  # below 1: the detections that were left out count as wrong
    assert after["ap"] < before["ap"]
    assert after["size"] < before["size"]
    assert min(before["latency_ms"], after["latency_ms"]) > 0
    assert f"AP {before['ap']:.4f}" in result.err
    assert f"AP {after['ap']:.4f}" in result.err
    scored = cli("evaluate", "x.onnx", "--data", own_truth, "--device", "cpu", "--json")
    assert scored.code == 0, scored.err
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
