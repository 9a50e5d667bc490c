"""Export to ONNX, OpenVINO's IR and torch.export's `.pt2`, each compared with PyTorch first.

    content, differences = onnx_model(Deployment(checkpoint), images)

Inputs and outputs: see `ssdctl.exporting.deployed`. Classes and thresholds are in the metadata.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ssdctl.boxes import IMAGE_SIZE, NUM_BOXES
from ssdctl.checkpoint.exported import PACKAGES, InputConvention, OnnxDescription
from ssdctl.checkpoint.format import TilingFields
from ssdctl.errors import import_package
from ssdctl.exporting.deployed import (
    Deployed,
    Deployment,
    Differences,
    Images,
    Reference,
    Runner,
    images_of,
)
from ssdctl.files import temporary_folder, write_bytes
from ssdctl.inference.onnx_detector import DECODED, DETECTIONS, open_session
from ssdctl.model.postprocess import DETECTIONS_PER_IMAGE
from ssdctl.runtime.packages import torch_warnings_ignored
from ssdctl.runtime.system import quota_cores

log = logging.getLogger(__name__)
RUNTIMES = {"onnx": "onnxruntime", "openvino": "OpenVINO", "pt2": "the loaded program"}
OPENVINO_METADATA = "ssdctl"  # key of the runtime information in the file
PT2_METADATA = "ssdctl.json"
MAX_BATCH = 65_536
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


def export_graph(
    deployment: Deployment, kind: str, target: Path, dataset: tuple[Path, Path]
) -> dict[str, Any]:
    """Write `onnx`, `openvino` or `pt2` if it gives PyTorch's outputs on images of the dataset.

    The images are generated if there is no dataset. Return the largest differences.
    """
    images, source = images_of(*dataset)
    if kind == "openvino":
        found = write_openvino(deployment, images, target)
    else:
        content, found = (onnx_model if kind == "onnx" else pt2_program)(deployment, images)
        write_bytes(target, content)
    log.info(
        "%(runtime)s agrees with PyTorch on %(count)d images (%(source)s): largest difference of "
        "boxes %(box_difference).1g of the image size, of scores %(score_difference).1g",
        {"runtime": RUNTIMES[kind], "count": len(images), "source": source, **found},
    )
    if kind == "openvino":
        log.info(
            "with OpenVINO's default precision on this CPU (%(default_precision)s): boxes "
            "%(default_box_difference).1g of the image size, scores %(default_score_difference).1g;"
            " the agreement above is with INFERENCE_PRECISION_HINT f32",
            found,
        )
    return {"fp16": deployment.is_fp16, "images": len(images), **found}


def example(deployment: Deployment) -> Tensor:
    """Return images to trace with; an exporter treats a batch of 1 as a constant."""
    return torch.zeros(deployment.batch or 2, IMAGE_SIZE, IMAGE_SIZE, 3, dtype=torch.uint8)


def dynamic_shapes(deployment: Deployment) -> dict[str, Any] | None:
    """Return a batch of any size; torch 2.6 and 2.7 refuse one without a limit."""
    return None if deployment.batch else {"images": {0: torch.export.Dim("batch", max=MAX_BATCH)}}


def pt2_program(deployment: Deployment, images: Images) -> tuple[bytes, Differences]:
    """Return the network as a `.pt2` file; compared with PyTorch after it is loaded again.

    The description of the detector is the extra file `ssdctl.json`.
    """
    with torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(
            Deployed(deployment),
            (example(deployment),),
            dynamic_shapes=dynamic_shapes(deployment),
        )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it has paths of this machine
    file = io.BytesIO()
    metadata = msgspec.json.encode(description(deployment)).decode()
    torch.export.save(program, file, extra_files={PT2_METADATA: metadata})
    file.seek(0)
    loaded = torch.export.load(file).module()
    differences = Reference(deployment, images, "torch.export").check_outputs(
        lambda images: [output.numpy() for output in loaded(torch.from_numpy(images))]
    )
    return file.getvalue(), differences


def onnx_model(deployment: Deployment, images: Images) -> tuple[bytes, Differences]:
    """Return a checkpoint's network as an ONNX file that gives PyTorch's outputs on the images."""
    require_onnx()
    reference = Reference(deployment, images, "onnxruntime")
    model = network_graph(deployment)
    differences = reference.check_outputs(runner(model))
    if deployment.has_nms:
        model = with_nms(model, deployment)
    if deployment.outputs == "onnx":
        reference.check_detections(runner(model))
    return with_metadata(model, deployment), differences


def require_onnx() -> None:
    for name in ("onnx", "onnx.compose", "onnx.parser", "onnxruntime", "onnxscript"):
        import_package(name, *PACKAGES, "onnxscript")  # onnxscript: for PyTorch's exporter


def network_graph(deployment: Deployment) -> Any:
    with torch_warnings_ignored(), torch.inference_mode(False):
        program = torch.onnx.export(
            Deployed(deployment),
            (example(deployment),),
            dynamo=True,
            dynamic_shapes=dynamic_shapes(deployment),
            input_names=["images"],
            output_names=list(deployment.output_names),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    model: Any = program.model_proto
    for item in itertools.chain(model.graph.node, model.graph.value_info):
        del item.metadata_props[:]  # notes of PyTorch's exporter, with paths of this machine
    return model


def with_nms(model: Any, deployment: Deployment) -> Any:
    import onnx

    score_threshold, nms_iou = deployment.thresholds
    text = (NMS if deployment.outputs == "onnx" else EFFICIENT_NMS).format(
        ir=model.ir_version,
        opset=next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx")),
        batch=deployment.batch or "batch",
        per_class=deployment.constants.candidates_per_class,
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


def description(deployment: Deployment) -> OnnxDescription:
    """Return the metadata that a reader needs besides the graph."""
    checkpoint = deployment.checkpoint
    score_threshold, nms_iou = deployment.thresholds if deployment.has_nms else (None, None)
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
        thresholds=[*checkpoint.thresholds],
        tiling=None if checkpoint.tiling is None else TilingFields(*checkpoint.tiling),
    )


def with_metadata(model: Any, deployment: Deployment) -> bytes:
    """Return a checked ONNX file with what `ssdctl.checkpoint.exported` reads."""
    import onnx

    facts = description(deployment).as_metadata()
    onnx.helper.set_model_props(model, {"producer": "ssdctl", **facts})
    onnx.checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def runner(model: Any) -> Runner:
    session = open_session(model.SerializeToString())
    return lambda images: session.run(None, {"images": images})


def write_openvino(deployment: Deployment, images: Images, target: Path) -> Differences:
    """Write the network as IR, NAME.xml and NAME.bin, if OpenVINO gives PyTorch's outputs.

    Return the differences, also those without a hint for the precision (`default_*`).
    """
    require_onnx()
    openvino = import_package("openvino")
    reference = Reference(deployment, images, "OpenVINO")
    graph = network_graph(deployment)
    with _converted(openvino, graph, deployment) as file:
        compiled = _compiled(openvino, file, INFERENCE_PRECISION_HINT="f32")
        found = reference.check_outputs(_runner(compiled, deployment.output_names))
        compiled = _compiled(openvino, file)  # computes in bf16 where it can
        default = reference.compare(_runner(compiled, deployment.output_names))
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        found["default_precision"] = precision
        found |= {f"default_{name}": value for name, value in default.items()}
        if not deployment.has_nms:
            _publish(file, target)
            return found
    graph = with_nms(graph, deployment)
    with _converted(openvino, graph, deployment) as file:
        compiled = _compiled(openvino, file, INFERENCE_PRECISION_HINT="f32")
        reference.check_detections(_runner(compiled, DETECTIONS))
        _publish(file, target)
    return found


@contextlib.contextmanager
def _converted(openvino: Any, graph: Any, deployment: Deployment) -> Iterator[Path]:
    with temporary_folder("ssdctl-export-") as folder:
        source, file = folder / "model.onnx", folder / "model.xml"
        source.write_bytes(graph.SerializeToString())
        model = openvino.convert_model(source)
        for key, value in description(deployment).as_metadata().items():
            model.set_rt_info(value, [OPENVINO_METADATA, key])
        openvino.save_model(model, file, compress_to_fp16=deployment.is_fp16)
        yield file


def _compiled(openvino: Any, file: Path, **hints: str) -> Any:
    threads = {"INFERENCE_NUM_THREADS": quota_cores() or 0}
    return openvino.Core().compile_model(file, "CPU", {**hints, **threads})


def _runner(compiled: Any, names: tuple[str, ...]) -> Runner:
    return lambda images: list(map(compiled(images).__getitem__, names))


def _publish(file: Path, target: Path) -> None:
    """Write the weights, then the graph that refers to them by the name of the file."""
    write_bytes(target.with_suffix(".bin"), file.with_suffix(".bin").read_bytes())
    write_bytes(target, file.read_bytes())
