"""Export to ONNX, compared with PyTorch on real pictures by onnxruntime before publication.

    content, check = onnx_model(checkpoint, pictures, has_nms=True)

Input `images`: (B, 300, 300, 3) uint8 RGB pictures, any B; normalisation is inside.
Outputs with NMS: `boxes` (B, 200, 4) ltrb in fractions of the picture, `scores` and `labels`
(B, 200), the best first and padded with label 0, `count` (B). Raw: `offsets` (B, 4, 8732) and
`logits` (B, C, 8732). Class names and thresholds are in the file's metadata.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.checkpoint.onnx_file import InputConvention, OnnxDescription
from ssdctl.checkpoint.reader import Checkpoint, load_network
from ssdctl.errors import IntegrityError, missing_package
from ssdctl.model.augment import Normalise, normalise
from ssdctl.model.postprocess import (
    DETECTIONS_PER_IMAGE,
    boxes_and_scores,
    detect,
)
from ssdctl.model.ssd300 import SSD300

OPSET = 18
TOLERANCE = 1e-3  # of scores, and of boxes in fractions of the picture
# Share of detections: at an overlap of almost exactly the threshold, rounding decides.
MAX_DIFFERENT = 0.01
RAW_NAMES, DECODED_NAMES = ("offsets", "logits"), ("all_boxes", "all_scores")

# The 200 best of each class, NMS within each class, the 200 best of the picture: as
# ssdctl.model.postprocess does it, in ONNX's own operators.
NMS = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
nms (float[batch, boxes_in, 4] all_boxes, float[batch, classes, boxes_in] all_scores)
    => (float[batch, {most}, 4] boxes, float[batch, {most}] scores,
        int64[batch, {most}] labels, int64[batch] count)
{{
    per_class = Constant <value = int64[1] {{{per_class}}}> ()
    most = Constant <value = int64[1] {{{most}}}> ()
    most_per_class = Constant <value = int64 {{{per_class}}}> ()
    iou = Constant <value = float {{{iou}}}> ()
    threshold = Constant <value = float {{{threshold}}}> ()
    zero = Constant <value = float {{0.0}}> ()
    no_label = Constant <value = int64 {{0}}> ()
    one = Constant <value = int64 {{1}}> ()
    last = Constant <value = int64[1] {{-1}}> ()
    flattened = Constant <value = int64[2] {{0, -1}}> ()
    num_boxes = Constant <value = int64 {{{num_boxes}}}> ()

    class_best, class_place = TopK <axis = 2> (all_scores, per_class)
    axis2 = Constant <value = int64[1] {{2}}> ()
    least = ReduceMin <keepdims = 1> (class_best, axis2)
    is_candidate = GreaterOrEqual (all_scores, least)
    candidates = Where (is_candidate, all_scores, zero)
    kept = NonMaxSuppression (all_boxes, candidates, most_per_class, iou, threshold)

    shape = Shape (all_scores)
    empty = ConstantOfShape <value = float[1] {{0.0}}> (shape)
    kept_scores = GatherND (all_scores, kept)
    sparse = ScatterND (empty, kept, kept_scores)
    flat = Reshape (sparse, flattened)
    scores, place = TopK <axis = 1> (flat, most)
    is_real = Greater (scores, zero)

    label = Div (place, num_boxes)
    label_from_one = Add (label, one)
    labels = Where (is_real, label_from_one, no_label)
    box = Mod (place, num_boxes)
    box_index = Unsqueeze (box, last)
    found = GatherND <batch_dims = 1> (all_boxes, box_index)
    is_real_box = Unsqueeze (is_real, last)
    boxes = Where (is_real_box, found, zero)
    is_counted = Cast <to = 7> (is_real)
    axis1 = Constant <value = int64[1] {{1}}> ()
    count = ReduceSum <keepdims = 0> (is_counted, axis1)
}}
"""


class OnnxComparison(NamedTuple):
    """The difference between onnxruntime's outputs and PyTorch's."""

    pictures: int
    box_difference: float  # the largest, in fractions of the picture
    score_difference: float


def onnx_model(
    checkpoint: Checkpoint,
    pictures: NDArray[np.uint8],
    *,
    has_nms: bool,
    score_threshold: float | None = None,
    nms_iou: float | None = None,
) -> tuple[bytes, OnnxComparison]:
    """Return the network of a checkpoint as an ONNX file that gives the same outputs.

    Args:
        checkpoint: Ours or a third-party one.
        pictures: (P, 300, 300, 3) RGB, to compare on; at least 2, to check that the batch varies.
        has_nms: Include decoding and NMS; otherwise export the raw heads.
        score_threshold, nms_iou: Of the NMS that is included. None: the network's
            convention.

    Raises:
        UsageError: The packages of the extra `onnx` are not installed.
        IntegrityError: onnxruntime's outputs differ from PyTorch's.
    """
    onnx, runtime = _packages()
    network = load_network(checkpoint).eval()
    rules = network.conventions
    score_threshold = rules.score_threshold if score_threshold is None else score_threshold
    nms_iou = rules.nms_iou if nms_iou is None else nms_iou
    model = _exported(_Deployed(network, is_decoded=has_nms))
    check = _compare(runtime, model, network, pictures, is_decoded=has_nms)
    if has_nms:
        text = NMS.format(
            ir=model.ir_version,
            opset=OPSET,
            per_class=network.conventions.candidates_per_class,
            most=DETECTIONS_PER_IMAGE,
            num_boxes=len(default_boxes_cxcywh()),
            iou=nms_iou,
            threshold=score_threshold,
        )
        model = onnx.compose.merge_models(
            model, onnx.parser.parse_model(text), io_map=[(name, name) for name in DECODED_NAMES]
        )
        _merge_opsets(model)
        _compare_detections(runtime, model, network, pictures, score_threshold, nms_iou)
    facts = OnnxDescription(
        format=1,
        backbone=checkpoint.architecture.backbone,
        num_classes=checkpoint.architecture.num_classes,
        classes=[c.name for c in checkpoint.classes],
        category_ids=[c.id for c in checkpoint.classes],
        input=InputConvention(),
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        score_threshold=score_threshold if has_nms else None,
        nms_iou=nms_iou if has_nms else None,
    )
    onnx.helper.set_model_props(model, {"producer": "ssdctl", **facts.as_metadata()})
    onnx.checker.check_model(model)
    return model.SerializeToString(), check


def _merge_opsets(model: Any) -> None:
    """List each operator set once: merging two models lists both of theirs.

    onnxruntime runs such a model, but its quantization refuses it.
    """
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    del model.opset_import[:]
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version)


class _Deployed(nn.Module):
    """Compute the heads, or boxes and scores, from uint8 pictures."""

    def __init__(self, network: SSD300, is_decoded: bool) -> None:
        super().__init__()
        self.network = network
        self.is_decoded = is_decoded
        self.normalise = Normalise(conventions=network.conventions)
        self.register_buffer("defaults", default_boxes_cxcywh())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        offsets, logits = self.network(self.normalise(images))
        assert isinstance(self.defaults, Tensor)
        return (
            boxes_and_scores(
                offsets,
                logits,
                self.defaults,
                clips_boxes=self.network.conventions.clips_boxes,
            )
            if self.is_decoded
            else (offsets, logits)
        )


def _packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnx.compose
        import onnx.parser
        import onnxruntime
        import onnxscript  # noqa: F401 - PyTorch's exporter needs it
    except ImportError as error:
        raise missing_package(error.name, "onnx", "onnxruntime", "onnxscript") from None
    return onnx, onnxruntime


def _exported(model: _Deployed) -> Any:
    """Return the ONNX model of the network, for any batch size."""
    example = torch.zeros(2, 300, 300, 3, dtype=torch.uint8)  # the exporter treats 1 as a constant
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # warnings of the exporter itself
        program = torch.onnx.export(
            model,
            (example,),
            dynamo=True,
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}},
            input_names=["images"],
            output_names=list(DECODED_NAMES if model.is_decoded else RAW_NAMES),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _run(runtime: Any, model: Any, pictures: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Run the model on the first picture and on a batch of the others; return the outputs."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    first, rest = (session.run(None, {"images": p}) for p in (pictures[:1], pictures[1:]))
    return [np.concatenate(pair) for pair in zip(first, rest, strict=True)]


def _compare(
    runtime: Any, model: Any, network: SSD300, pictures: NDArray[np.uint8], *, is_decoded: bool
) -> OnnxComparison:
    """Compare all boxes and scores of the network."""
    outputs = [torch.from_numpy(a) for a in _run(runtime, model, pictures)]
    decode = partial(
        boxes_and_scores,
        defaults_cxcywh=default_boxes_cxcywh(),
        clips_boxes=network.conventions.clips_boxes,
    )
    with torch.inference_mode():
        exported = outputs if is_decoded else decode(outputs[0], outputs[1])
        expected = decode(*_outputs(network, pictures))
    boxes, scores = (float((a - b).abs().max()) for a, b in zip(expected, exported, strict=True))
    if not (boxes <= TOLERANCE and scores <= TOLERANCE):  # NaN fails too
        raise IntegrityError(
            f"onnxruntime differs from PyTorch by {boxes:.2g} in boxes and {scores:.2g} in scores; "
            "nothing was written",
            hint="another version of onnxruntime or torch may agree",
        )
    return OnnxComparison(len(pictures), boxes, scores)


def _compare_detections(
    runtime: Any,
    model: Any,
    network: SSD300,
    pictures: NDArray[np.uint8],
    score_threshold: float,
    nms_iou: float,
) -> None:
    """Compare the detections after NMS."""
    exported = _run(runtime, model, pictures)
    with torch.inference_mode():
        expected = detect(
            *_outputs(network, pictures),
            default_boxes_cxcywh(),
            score_threshold=score_threshold,
            nms_iou=nms_iou,
            candidates=network.conventions.candidates_per_class,
            clips_boxes=network.conventions.clips_boxes,
        )
    total = wrong = 0
    for reference, boxes, scores, labels, count in zip(expected, *exported, strict=True):
        n = int(count)
        a = (boxes[:n], scores[:n], labels[:n])
        b = (reference.boxes.numpy(), reference.scores.numpy(), reference.labels.numpy())
        wrong += _unmatched(a, b) + _unmatched(b, a)
        total += n + len(reference.scores)
    if wrong > MAX_DIFFERENT * total:
        raise IntegrityError(
            f"{wrong} of {total} detections differ between onnxruntime and PyTorch; "
            "nothing was written",
            hint="another version of onnxruntime or torch may agree",
        )


def _outputs(network: SSD300, pictures: NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """Return PyTorch's offsets and logits of (P, 300, 300, 3) pictures."""
    pixels = normalise(torch.from_numpy(pictures), conventions=network.conventions)
    outputs: tuple[Tensor, Tensor] = network(pixels)
    return outputs


def _unmatched(a: tuple[NDArray[Any], ...], b: tuple[NDArray[Any], ...]) -> int:
    """Return how many detections of `a` have no counterpart in `b`."""
    is_same = (
        (np.abs(a[0][:, None] - b[0][None]).max(axis=2, initial=0) <= TOLERANCE)
        & (np.abs(a[1][:, None] - b[1][None]) <= TOLERANCE)
        & (a[2][:, None] == b[2][None])
    )
    return int((~is_same.any(axis=1)).sum())
