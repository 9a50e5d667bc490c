"""Random networks with random options of `ssdctl export`, run by their runtimes.

On ten images the file gives PyTorch's outputs and detections within the documented tolerance, and its
metadata has classes and thresholds. A failure prints the program that makes the smallest file.
"""

import copy
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import check_examples, seeds
from hypothesis import note
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import ssdctl
from ssdctl.data.shapes import generate
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.exporting import EARLIER
from ssdctl.files import require_own_file

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}
NMS = {"onnx": ("onnx", "none"), "openvino": ("onnx", "none"), "pt2": ("none",)}
NAMES = {"onnx": ("boxes", "scores", "labels", "count"), "none": ("all_boxes", "all_scores"),
         "raw": ("offsets", "logits")}  # fmt: skip
# `export` refuses fp16 that changes a score or a box by more than 0.01 on five other images.
LEAST_EFFECT = 0.005
VARIANCES = 0.1, 0.2  # of centers and sizes (Liu et al.)
# The first choices of each setting make the smallest example, which the default suite runs.
ODD_NAMES = st.sampled_from(["a,b", '"', "\\", "Ü 中 🐟", " padded ", "[]", "null", "1"]) | st.text(
    st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12
).filter(str.strip)


class Export(NamedTuple):
    """A network with random weights, and the options of its file."""

    backbone: str
    extra_norm: str
    names: list[str]
    seed: int
    dtype: str  # of the weights when they were saved
    format: str
    outputs: str
    batch: int | None
    fp16: bool
    score: float
    nms_iou: float | None

    @property
    def options(self) -> dict[str, Any]:
        how = {"raw": True} if self.outputs == "raw" else {"nms": self.outputs}
        of_nms = {"score_threshold": self.score, "nms_iou": self.nms_iou}
        how |= of_nms if self.outputs == "onnx" else {}
        return {**how, "format": self.format, "batch": self.batch, "fp16": self.fp16}

    def __str__(self) -> str:
        return (
            f"model = lively(ssdctl.SSD300({self.backbone!r}, {len(self.names) + 1}, "
            f"{self.extra_norm!r}), {self.seed}).to(torch.{self.dtype})\n"
            f"model.save('net.pt', class_names={self.names!r})\n"
            f"ssdctl.export('net.pt', 'net{SUFFIXES[self.format]}', **{self.options!r})"
        )


@st.composite
def exports(draw: st.DrawFn, backbones: tuple[str, ...], formats: tuple[str, ...]) -> Export:
    backbone, kind = draw(st.sampled_from(backbones)), draw(st.sampled_from(formats))
    least, most = draw(st.sampled_from([(3, 5), (1, 1), (1, 30), (100, 200)]))
    names = st.lists(ODD_NAMES, min_size=least, max_size=most, unique=True)
    return Export(
        backbone,
        "none" if backbone == "vgg16" else draw(st.sampled_from(["batch", "none"])),
        draw(names),
        draw(st.integers(0, 99)),
        draw(st.sampled_from(["float32", "float32", "bfloat16", "float16", "float64"])),
        kind,
        draw(st.sampled_from([*NMS[kind], "raw"])),
        draw(st.none() | st.sampled_from([1, 2, np.int64(3), 4])),
        draw(st.booleans()),
        draw(st.sampled_from([0.05, 0.01, 0.3, 0.9, 0.0])),
        draw(st.none() | st.sampled_from([0.25, 0.45, 0.7])),
    )


def lively(model: ssdctl.SSD300, seed: int) -> ssdctl.SSD300:
    """Give a network weights and statistics as if it were trained: scores near 0 and near 1."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    model.eval()
    hooks = []
    for heads, deviation in ((model.box_heads, 1.0), (model.class_heads, 2.0)):
        for head in heads:

            def scale(
                module: Any, _: Any, output: torch.Tensor, deviation: float = deviation
            ) -> None:
                module.weight.mul_(deviation / output.std())

            hooks.append(head.register_forward_hook(scale))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, generator=generator)
        model(torch.randn(2, 3, 300, 300, generator=generator))
    for hook in hooks:
        hook.remove()
    return model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return eight images of shapes, one black and one of noise, (10, 300, 300, 3)."""
    folder = tmp_path_factory.mktemp("images")
    generate(folder, num_train=1, num_val=8, seed=5)
    files = sorted((folder / "val2017").iterdir())
    shapes = [np.asarray(Image.open(file).convert("RGB").resize((300, 300))) for file in files]
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    return np.stack([*shapes, np.zeros((300, 300, 3), np.uint8), noise])


def run(path: Path, images: np.ndarray, names: tuple[str, ...]) -> list[np.ndarray]:
    if path.suffix == ".pt2":
        return [x.numpy() for x in torch.export.load(path).module()(torch.from_numpy(images))]
    if path.suffix == ".xml":
        import openvino

        hints = {"INFERENCE_PRECISION_HINT": "f32"}
        results = openvino.Core().compile_model(path, "CPU", hints)(images)
        return [results[name] for name in names]
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(list(names), {"images": images})


def fixed_batch(path: Path) -> int | None:
    """Return the number of images that a file takes; None for any number."""
    if path.suffix == ".pt2":
        (size, *_), *_ = (
            node.meta["val"].shape
            for node in torch.export.load(path).graph.nodes
            if node.name == "images"
        )
        return size if isinstance(size, int) else None
    if path.suffix == ".xml":
        import openvino

        dimension = openvino.Core().read_model(path).input().partial_shape[0]
        return dimension.get_length() if dimension.is_static else None
    import onnx

    return onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_value or None


def metadata(path: Path) -> dict[str, Any]:
    if path.suffix == ".pt2":
        extra = {"ssdctl.json": ""}
        torch.export.load(path, extra_files=extra)
        return json.loads(extra["ssdctl.json"])
    if path.suffix == ".xml":
        import openvino

        info = openvino.Core().read_model(path).get_rt_info()["ssdctl"]
        return {key: json.loads(value.astype(str)) for key, value in info.items()}
    import onnx

    entries = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return {key: json.loads(value) for key, value in entries.items() if key != "producer"}


def effect_of_fp16(model: ssdctl.SSD300, images: np.ndarray) -> float:
    """Return the largest change of a score or box by rounding the weights of convolutions."""
    before = outputs_of(model, images, "none")
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.data = module.weight.data.half().float()
    after = outputs_of(rounded, images, "none")
    return max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True))


def outputs_of(model: ssdctl.SSD300, images: np.ndarray, kind: str) -> list[np.ndarray]:
    """Return the raw heads, or all boxes and scores, by the formulas of the paper."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in model.constants[:2])
    with torch.no_grad():
        offsets, logits = model((torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - mean) / std)
    if kind == "raw":
        return [offsets.numpy(), logits.numpy()]
    defaults, offsets = ssdctl.default_boxes(), offsets.transpose(1, 2)
    centers = defaults[:, :2] + VARIANCES[0] * offsets[..., :2] * defaults[:, 2:]
    halves = defaults[:, 2:] * torch.exp(VARIANCES[1] * offsets[..., 2:]) / 2
    boxes = torch.cat([centers - halves, centers + halves], dim=-1)
    boxes = boxes.clamp(0, 1) if model.constants.clips_boxes else boxes
    return [boxes.numpy(), logits.softmax(dim=1)[:, 1:].numpy()]


def check(export: Export, images: np.ndarray) -> None:
    note(str(export))
    for file in Path().glob("net*"):
        file.unlink()
    model = lively(ssdctl.SSD300(export.backbone, len(export.names) + 1, export.extra_norm), export.seed)  # fmt: skip
    model.to(getattr(torch, export.dtype)).save("net.pt", class_names=export.names)
    model = ssdctl.SSD300.from_checkpoint("net.pt")
    assert model.class_names == export.names
    path = Path(f"net{SUFFIXES[export.format]}")
    if export.outputs != "onnx" and export.nms_iou is not None:
        with pytest.raises(UsageError, match="nms_iou"):  # without NMS it has no effect
            ssdctl.export("net.pt", path, **export.options, nms_iou=export.nms_iou)
    try:
        ssdctl.export("net.pt", path, **export.options)
    except IntegrityError as error:
        if export.fp16 and effect_of_fp16(model, images) > LEAST_EFFECT:
            return
        raise AssertionError(str(export)) from error

    if export.fp16 and export.format != "pt2":  # which has an example of the input
        weights = sum(parameter.numel() for parameter in model.parameters())
        file = path.with_suffix(".bin") if export.format == "openvino" else path
        boxes = 16 * 8732 * (export.batch or 1)  # default boxes, of each image of a fixed batch
        assert file.stat().st_size < 3 * weights + boxes + 150_000

    require_own_file(path, "--out", EARLIER[export.format])  # it may be replaced
    package = str(Path(ssdctl.__file__).parent).encode()
    assert not any(package in file.read_bytes() for file in Path().glob("net*")), "a local path"
    assert fixed_batch(path) == export.batch
    facts, has_nms = metadata(path), export.outputs == "onnx"
    assert facts["classes"] == export.names
    assert (facts["backbone"], facts["num_classes"]) == (export.backbone, len(export.names) + 1)
    iou = export.nms_iou or model.constants.nms_iou
    expected = (export.score, iou) if has_nms else (None, None)
    assert (facts["score_threshold"], facts["nms_iou"]) == expected

    size = export.batch or 3  # ten images: the last batch is smaller
    batches = [images[i : i + size] for i in range(0, len(images), size)]
    if export.batch:
        batches = [np.resize(batch, (size, *batch.shape[1:])) for batch in batches]
    parts = [run(path, batch, NAMES[export.outputs]) for batch in batches]
    found = [np.concatenate(arrays)[: len(images)] for arrays in zip(*parts, strict=True)]
    if has_nms:
        check_detections(export, model, images, found)
    else:
        for array, reference in zip(found, outputs_of(model, images, export.outputs), strict=True):
            is_raw = export.outputs == "raw"
            scale = 1 + np.abs(reference) if is_raw else 1
            # `export` compares scores, not logits, of five other images, in fp16 to 1e-2.
            limit = (5e-2 if is_raw else 2e-2) if export.fp16 else 1e-3
            assert (np.abs(array - reference) / scale).max() <= limit
    if export.format == "onnx":
        check_reading(export, path, model, images[0])


def check_detections(
    export: Export, model: ssdctl.SSD300, images: np.ndarray, found: list[np.ndarray]
) -> None:
    """Find a counterpart of nearly every detection; the rest depends on rounding."""
    tolerance, least = (1e-2, 0.95) if export.fp16 else (1e-3, 0.99)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    results = model.detect(pixels, score=export.score, nms_iou=export.nms_iou)
    total = matched = 0
    for result, boxes, scores, labels, count in zip(results, *found, strict=True):
        assert (labels[count:] == 0).all()
        assert (labels[:count] > 0).all()
        assert (np.diff(scores) <= 0).all()
        same = (
            (np.abs(boxes[:count, None].clip(0, 1) - result.boxes / 300).max(axis=2, initial=0) <= tolerance)
            & (np.abs(scores[:count, None] - result.scores) <= tolerance)
            & (labels[:count, None] == result.labels)
        )  # fmt: skip
        total += same.shape[0] + same.shape[1]
        matched += same.any(axis=0).sum() + same.any(axis=1).sum()
    assert matched >= least * total, f"{matched} of {total} agree"


def check_reading(export: Export, path: Path, model: ssdctl.SSD300, image: np.ndarray) -> None:
    """`ssdctl.load` takes the file in place of the checkpoint."""
    has_nms = export.outputs == "onnx"
    thresholds: dict[str, Any] = {} if has_nms else {"nms_iou": export.nms_iou}
    score = max(export.score, 0.3)
    results = [
        copy.deepcopy(ssdctl.load(file, device="cpu", score=score, **how))(image)
        for file, how in ((path, thresholds), ("net.pt", {"nms_iou": export.nms_iou}))
    ]
    first, second = (Counter(result.names) for result in results)
    assert max((first - second).total(), (second - first).total()) <= 2 + 0.05 * second.total()


def run_exports(
    images: np.ndarray,
    number: int | None,
    count: int,
    backbones: tuple[str, ...] = ("tiny",),
    formats: tuple[str, ...] = ("onnx",),
) -> None:
    needed = {"onnx": ("onnx", "onnxruntime", "onnxscript"), "pt2": ()}
    needed["openvino"] = (*needed["onnx"], "openvino")
    runnable = tuple(kind for kind in formats if all(map(importlib.util.find_spec, needed[kind])))
    if not runnable:
        pytest.skip(f"no packages for {', '.join(formats)}")

    def check_one(export: Export) -> None:
        check(export, images)

    drawn = exports(backbones, runnable)
    check_examples(check_one, count, number, shrinks=False, export=drawn)


def test_an_export(images: np.ndarray) -> None:
    run_exports(images, None, 1)


@pytest.mark.slow(in_ci=True)
def test_exports_for_other_runtimes(images: np.ndarray) -> None:
    for kind in ("pt2", "openvino"):
        run_exports(images, None, 1, formats=(kind,))


@pytest.mark.slow
def test_many_exports(images: np.ndarray) -> None:
    backbones = ("tiny", "tiny", "tiny", "resnet18", "resnet50", "vgg16")
    for number in seeds():
        run_exports(images, number, 5, backbones, tuple(SUFFIXES))
