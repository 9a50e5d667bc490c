"""Export a checkpoint as a call requests: `ssdctl export`, `ssdctl.export`. Imports torch late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from ssdctl.config import Resolved
from ssdctl.errors import UsageError
from ssdctl.files import remove_stale_temporaries
from ssdctl.runtime.packages import check_memory_limit
from ssdctl.runtime.progress import Progress

if TYPE_CHECKING:
    from ssdctl.exporting.deployed import Nms

GRAPH_FORMATS = ("onnx", "openvino", "pt2")
FORMATS = (*GRAPH_FORMATS, "safetensors", "mlperf", "nvidia")
NMS = ("onnx", "efficientnms", "none")
MAX_BATCH = 4096
CALIBRATION_IMAGES = 128
MAX_AP_LOSS = 0.01


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
        raise UsageError(f"{request.out}: is the checkpoint itself", hint="give another file")
    check_memory_limit()
    from ssdctl.checkpoint.file import load_checkpoint  # imports torch
    from ssdctl.evaluation.evaluate import choose_data
    from ssdctl.exporting import formats
    from ssdctl.exporting.deployed import ExportOptions

    names = request.out.name, request.out.with_suffix(".bin").name
    remove_stale_temporaries(request.out.parent, *names)
    content = load_checkpoint(source)
    result: dict[str, Any] = {"file": str(request.out), "format": request.format}
    result["source"] = str(source)
    if request.format not in GRAPH_FORMATS:
        formats.export(content, request.format, request.out)
        return result
    settings = resolved.config.evaluate
    options = ExportOptions(
        outputs, request.batch, request.fp16, settings.score_threshold, settings.nms_iou
    )
    result |= {"nms": outputs, "batch": request.batch or "dynamic"}
    data = choose_data(content, resolved.config.data, resolved.explicit_settings())
    config = msgspec.structs.replace(resolved.config, data=data)
    if not request.int8:
        return result | formats.export_graph(content, request.format, request.out, options, config)
    from ssdctl.exporting.int8 import write_int8

    count = CALIBRATION_IMAGES if request.calibrate is None else request.calibrate
    return result | write_int8(
        content,
        request.out,
        formats.training_images(data, count),
        options,
        config,
        max_ap_loss=MAX_AP_LOSS if request.max_ap_loss is None else request.max_ap_loss,
        progress=progress,
    )


def _check(request: ExportRequest) -> Nms:
    """Check that the options fit the format; return the outputs of a graph, see `deployed`."""
    kind, nms, batch = request.format, request.nms, request.batch
    if kind not in FORMATS:
        raise UsageError(f"format: {kind!r} is not one of {', '.join(FORMATS)}")
    if request.out.is_dir():
        raise UsageError(f"{request.out}: is a folder", hint="give the name of a file in it")
    is_given = {
        "raw": request.raw,
        "nms": nms is not None,
        "batch": batch is not None,
        "fp16": request.fp16,
    }
    if kind not in GRAPH_FORMATS and (names := [name for name in is_given if is_given[name]]):
        raise UsageError(f"{', '.join(names)}: for {', '.join(GRAPH_FORMATS)}, not for {kind}")
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"batch {batch}: expected a number from 1 to {MAX_BATCH}")
    if request.int8 and (kind != "onnx" or request.fp16):
        raise UsageError("int8 is for the format onnx, and not together with fp16")
    if not request.int8 and (request.calibrate is not None or request.max_ap_loss is not None):
        raise UsageError("calibrate and max-ap-loss are for int8")
    if request.raw and nms is not None:
        raise UsageError("raw leaves out NMS: give either raw or nms")
    allowed = {"openvino": ("onnx", "none"), "pt2": ("none",)}.get(kind, NMS)
    if nms is not None and nms not in allowed:
        raise UsageError(f"nms {nms}: for {kind}, choose {' or '.join(allowed)}")
    return cast("Nms", "raw" if request.raw else nms or allowed[0])
