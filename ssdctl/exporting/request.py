"""Export a checkpoint as a call requests: `ssdctl export`, `ssdctl.export`. Imports torch late."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from ssdctl.config import Config, Resolved
from ssdctl.errors import UsageError
from ssdctl.files import remove_stale_temporaries, write_bytes
from ssdctl.runtime.packages import check_memory_limit
from ssdctl.runtime.progress import Progress

if TYPE_CHECKING:
    from ssdctl.checkpoint.contents import Checkpoint
    from ssdctl.exporting.deployed import ExportOptions, Nms

GRAPH_FORMATS = ("onnx", "openvino", "pt2")
FORMATS = (*GRAPH_FORMATS, "safetensors", "mlperf", "nvidia")
RUNTIMES = {"onnx": "onnxruntime", "openvino": "OpenVINO", "pt2": "the loaded program"}
NMS = ("onnx", "efficientnms", "none")
MAX_BATCH = 4096
CALIBRATION_IMAGES = 128
MAX_AP_LOSS = 0.01
log = logging.getLogger(__name__)


class ExportRequest(NamedTuple):
    """What to write; the options of `ssdctl export`."""

    format: str
    out: Path
    nms: str | None = None  # None: the format's default
    raw: bool = False
    batch: int | None = None  # images of a call; None: any number
    fp16: bool = False
    int8: bool = False
    calibrate: int | None = None  # images; None: CALIBRATION_IMAGES
    max_ap_loss: float | None = None  # None: MAX_AP_LOSS


def export_checkpoint(
    checkpoint: str, request: ExportRequest, resolved: Resolved, *, progress: Progress
) -> dict[str, Any]:
    """Write a checkpoint in another format; return the file, its source, and what was compared.

    Raises:
        UsageError: The options do not fit the format, or the network, or a package is missing.
        IntegrityError: The checkpoint is damaged, or the outputs differ from PyTorch's.
    """
    outputs = _check(request)
    from ssdctl.inference.model_source import locate_checkpoint

    source = locate_checkpoint(checkpoint, mirror=resolved.config.download.mirror)
    if request.out.exists() and request.out.samefile(source):
        raise UsageError(f"--out {request.out} is the checkpoint itself", hint="give another file")
    check_memory_limit()
    from ssdctl.checkpoint.file import load_checkpoint  # imports torch

    remove_stale_temporaries(
        request.out.parent, request.out.name, request.out.with_suffix(".bin").name
    )
    content = load_checkpoint(source)
    result: dict[str, Any] = {"file": str(request.out), "format": request.format}
    result["source"] = str(source)
    if request.format not in GRAPH_FORMATS:
        from ssdctl.exporting.formats import export

        export(content, request.format, request.out)
        return result
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.evaluation.checkpoint import choose_data
    from ssdctl.exporting.deployed import ExportOptions

    settings = resolved.config.evaluate
    options = ExportOptions(
        outputs, request.batch, request.fp16, settings.score_threshold, settings.nms_iou
    )
    result |= {"nms": outputs, "batch": request.batch or "dynamic"}
    data = choose_data(content, resolved.config.data, resolved.explicit_settings())
    if not request.int8:
        return result | _export_graph(content, request, options, dataset_folders(data))
    config = msgspec.structs.replace(resolved.config, data=data)
    return result | _export_int8(content, request, options, config, progress)


def _check(request: ExportRequest) -> Nms:
    """Check that the options fit the format, and the file; return the outputs of a graph."""
    kind = request.format
    if kind not in FORMATS:
        raise UsageError(f"--format: {kind!r} is not one of {', '.join(FORMATS)}")
    if request.out.is_dir():
        raise UsageError(f"--out {request.out}: is a folder", hint="give the name of a file in it")
    outputs = _outputs(kind, request.nms, request.raw)
    if request.batch is not None and not 1 <= request.batch <= MAX_BATCH:
        raise UsageError(f"--batch {request.batch}: expected a number from 1 to {MAX_BATCH}")
    if (request.calibrate is not None or request.max_ap_loss is not None) and not request.int8:
        raise UsageError("--calibrate and --max-ap-loss apply to --int8")
    if request.int8 and kind != "onnx":
        raise UsageError(f"--int8 applies to --format onnx, not to {kind}")
    if request.int8 and request.fp16:
        raise UsageError("give either --int8 or --fp16")
    if kind not in GRAPH_FORMATS:
        for option, is_given in (("--batch", request.batch is not None), ("--fp16", request.fp16)):
            if is_given:
                raise UsageError(f"{option} applies to {', '.join(GRAPH_FORMATS)}, not to {kind}")
    return outputs


def _outputs(kind: str, nms: str | None, raw: bool) -> Nms:
    """Return the outputs of a graph; see `ssdctl.exporting.deployed`."""
    allowed = {"onnx": NMS, "openvino": ("onnx", "none"), "pt2": ("none",)}.get(kind, ())
    if raw and nms is not None:
        raise UsageError("--raw leaves out NMS: give either --raw or --nms")
    for option, is_given in (("--raw", raw), (f"--nms {nms}", nms is not None)):
        if is_given and not allowed:
            raise UsageError(f"{option} applies to {', '.join(GRAPH_FORMATS)}, not to {kind}")
    if raw:
        return "raw"
    if nms is not None and nms not in allowed:
        raise UsageError(f"--nms {nms}: for {kind}, choose {' or '.join(allowed)}")
    return cast("Nms", nms or ("none" if kind == "pt2" else "onnx"))


def _export_int8(
    checkpoint: Checkpoint,
    request: ExportRequest,
    options: ExportOptions,
    config: Config,
    progress: Progress,
) -> dict[str, Any]:
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.exporting.formats import training_images
    from ssdctl.exporting.int8 import int8_model

    count = CALIBRATION_IMAGES if request.calibrate is None else request.calibrate
    images = training_images(*dataset_folders(config.data), count)
    max_ap_loss = MAX_AP_LOSS if request.max_ap_loss is None else request.max_ap_loss
    quantized = int8_model(
        checkpoint, options, images, config, max_ap_loss=max_ap_loss, progress=progress
    )
    write_bytes(request.out, quantized.content)
    costs = {"before": quantized.before._asdict(), "after": quantized.after._asdict()}
    for name, cost in (("fp32", quantized.before), ("int8", quantized.after)):
        log.info(
            "%s: AP %.4f, %.1f MB, %.1f ms a call", name, cost.ap, cost.size / 1e6, cost.latency_ms
        )
    log.info("ranges from %d images; heads in %s", len(images), quantized.heads)
    return {"heads": quantized.heads, "pictures": len(images), **costs}


def _export_graph(
    checkpoint: Checkpoint,
    request: ExportRequest,
    options: ExportOptions,
    folders: tuple[Path, Path],
) -> dict[str, Any]:
    from ssdctl.exporting.formats import export_graph

    comparison, source = export_graph(checkpoint, request.format, request.out, folders, options)
    log.info(
        "%s agrees with PyTorch on %d images (%s): largest difference of boxes %.1g of the image "
        "size, of scores %.1g",
        RUNTIMES[request.format],
        comparison.images,
        source,
        comparison.box_difference,
        comparison.score_difference,
    )
    if comparison.default_precision is not None:
        log.info(
            "with OpenVINO's default precision on this CPU (%s): boxes %.1g of the image size, "
            "scores %.1g; the agreement above is that of INFERENCE_PRECISION_HINT f32",
            comparison.default_precision,
            comparison.default_box_difference,
            comparison.default_score_difference,
        )
    return {"fp16": options.is_fp16, **comparison.as_json()}
