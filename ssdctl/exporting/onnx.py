"""Export to ONNX, compared with PyTorch on real images by onnxruntime before it is written.

    content, comparison = onnx_model(checkpoint, images, ExportOptions())

Inputs and outputs: see `ssdctl.exporting.deployed`. Classes and thresholds are in the metadata.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

from ssdctl.boxes import NUM_BOXES
from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.exported import PACKAGES, InputConvention, OnnxDescription
from ssdctl.errors import missing_package
from ssdctl.exporting.deployed import (
    Deployed,
    Differences,
    ExportOptions,
    Images,
    Reference,
    Runner,
    example,
)
from ssdctl.inference.onnx_detector import DECODED
from ssdctl.model.backbones import find_backbone
from ssdctl.model.postprocess import DETECTIONS_PER_IMAGE
from ssdctl.runtime.system import quota_cores

OPSET = 18

# The 200 best of each class, NMS within each class, the 200 best of the image: as
# ssdctl.model.postprocess does it, in ONNX's own operators.
NMS = """
<ir_version: {ir}, opset_import: ["" : {opset}]>
nms (float[{batch}, boxes_in, 4] all_boxes, float[{batch}, classes, boxes_in] all_scores)
    => (float[{batch}, {most}, 4] boxes, float[{batch}, {most}] scores,
        int64[{batch}, {most}] labels, int64[{batch}] count)
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

# TensorRT's plugin, which takes the place of NMS when an engine is built. Its classes start at 0.
# The plugin considers the 4096 best candidates of an image.
EFFICIENT_NMS = """
<ir_version: {ir}, opset_import: ["" : {opset}, "TRT" : 1]>
nms (float[{batch}, boxes_in, 4] all_boxes, float[{batch}, classes, boxes_in] all_scores)
    => (int32[{batch}, 1] num_detections, float[{batch}, {most}, 4] detection_boxes,
        float[{batch}, {most}] detection_scores, int32[{batch}, {most}] detection_classes)
{{
    scores_of_boxes = Transpose <perm = [0, 2, 1]> (all_scores)
    num_detections, detection_boxes, detection_scores, detection_classes = TRT.EfficientNMS_TRT <
        score_threshold = {threshold}, iou_threshold = {iou}, max_output_boxes = {most},
        background_class = -1, score_activation = 0, class_agnostic = 0, box_coding = 0,
        plugin_version = "1"
    > (all_boxes, scores_of_boxes)
}}
"""


def onnx_model(
    checkpoint: Checkpoint, images: Images, options: ExportOptions
) -> tuple[bytes, Differences]:
    """Return a checkpoint's network as an ONNX file that gives PyTorch's outputs on the images.

    Raises:
        UsageError: The packages of the extra `onnx` are not installed.
        IntegrityError: onnxruntime's outputs differ from PyTorch's.
        NonFiniteError: The network's output is NaN or infinite.
    """
    require_onnx()
    reference = Reference(checkpoint, images, options, "onnxruntime")
    model = network_graph(checkpoint, options)
    differences = reference.check_outputs(runner(model))
    if options.has_nms:
        model = with_nms(model, checkpoint, options)
    if options.nms == "onnx":
        reference.check_detections(runner(model))
    return with_metadata(model, checkpoint, options), differences


def require_onnx() -> None:
    """Raise UsageError unless the packages of the extra `onnx` are installed."""
    try:
        for name in ("onnx", "onnx.compose", "onnx.parser", "onnxruntime", "onnxscript"):
            importlib.import_module(name)  # onnxscript: for PyTorch's exporter
    except ImportError as error:
        raise missing_package(error.name, *PACKAGES, "onnxscript") from None


def network_graph(checkpoint: Checkpoint, options: ExportOptions) -> Any:
    dynamic = None if options.batch else {"images": {0: torch.export.Dim("batch")}}
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")  # warnings of the exporter itself
        program = torch.onnx.export(
            Deployed(checkpoint, options),
            (example(options),),
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=["images"],
            output_names=list(options.output_names),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def with_nms(model: Any, checkpoint: Checkpoint, options: ExportOptions) -> Any:
    import onnx

    constants = find_backbone(checkpoint.architecture.backbone).CONSTANTS
    chosen = options.score_threshold, options.nms_iou
    score_threshold, nms_iou = constants.thresholds(*chosen)
    text = (NMS if options.nms == "onnx" else EFFICIENT_NMS).format(
        ir=model.ir_version,
        opset=next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx")),
        batch=options.batch or "batch",
        per_class=constants.candidates_per_class,
        most=DETECTIONS_PER_IMAGE,
        num_boxes=NUM_BOXES,
        iou=f"{nms_iou:.9f}",
        threshold=f"{score_threshold:.9f}",
    )
    merged = onnx.compose.merge_models(
        model, onnx.parser.parse_model(text), io_map=[(name, name) for name in DECODED]
    )
    clean_opsets(merged)
    return merged


def clean_opsets(model: Any) -> None:
    """List each operator set that is used, once.

    Merging two models lists both of theirs, which onnxruntime's quantization refuses; onnxruntime's
    optimizer lists all that it implements.
    """
    used = {"", *(node.domain for node in model.graph.node)}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    del model.opset_import[:]
    for domain, version in opsets.items():
        if domain in used:
            model.opset_import.add(domain=domain, version=version)


def description(checkpoint: Checkpoint, options: ExportOptions) -> OnnxDescription:
    """Return what a reader needs in addition to the graph."""
    constants = find_backbone(checkpoint.architecture.backbone).CONSTANTS
    chosen = options.score_threshold, options.nms_iou
    score_threshold, nms_iou = constants.thresholds(*chosen) if options.has_nms else (None, None)
    return OnnxDescription(
        format=1,
        backbone=checkpoint.architecture.backbone,
        num_classes=checkpoint.architecture.num_classes,
        classes=[c.name for c in checkpoint.classes],
        category_ids=[c.id for c in checkpoint.classes],
        input=InputConvention(),
        step=checkpoint.step,
        epoch=checkpoint.epoch,
        score_threshold=score_threshold,
        nms_iou=nms_iou,
    )


def with_metadata(model: Any, checkpoint: Checkpoint, options: ExportOptions) -> bytes:
    """Return a checked ONNX file with what `ssdctl.checkpoint.exported` reads."""
    import onnx

    facts = description(checkpoint, options).as_metadata()
    onnx.helper.set_model_props(model, {"producer": "ssdctl", **facts})
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def runner(model: Any) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = quota_cores() or 0  # 0: all cores
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run(None, {"images": images})
