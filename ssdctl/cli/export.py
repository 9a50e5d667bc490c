"""`ssdctl export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command, completer
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.checkpoint.reader import Checkpoint
    from ssdctl.export.deployed import ExportOptions, Nms

GRAPH_FORMATS = ("onnx", "openvino", "pt2")
FORMATS = (*GRAPH_FORMATS, "safetensors", "mlperf", "nvidia")
RUNTIMES = {"onnx": "onnxruntime", "openvino": "OpenVINO", "pt2": "the loaded program"}
NMS = ("onnx", "efficientnms", "none")
MAX_BATCH = 4096
CALIBRATION_PICTURES = 128
MAX_AP_LOSS = 0.01


@command(
    app,
    "export",
    panel="Results",
    settings=["data.root", "evaluate.score_threshold", "evaluate.nms_iou", "evaluate.limit"],
    examples=[
        "ssdctl export best.pt --format onnx --out ssd.onnx",
        "ssdctl export best.pt --format onnx --nms efficientnms --batch 8 --out trt.onnx",
        "ssdctl export best.pt --format onnx --int8 --calibrate 200 --out small.onnx",
        "ssdctl export best.pt --format openvino --fp16 --out ssd.xml",
        "ssdctl export best.pt --format pt2 --out ssd.pt2",
        "ssdctl export best.pt --format safetensors --out ssd.safetensors",
        "ssdctl export best.pt --format mlperf --out iter_120000.pt",
    ],
)
def export(
    call: Call,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="Checkpoint, run folder, detector name or hf://org/name[@revision]",
            show_default=False,
        ),
    ],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="onnx, openvino, pt2, safetensors, or a third-party format: mlperf, nvidia",
            autocompletion=completer(FORMATS),
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write", show_default=False)
    ],
    nms: Annotated[
        str | None,
        typer.Option(
            "--nms",
            metavar="NMS",
            help="onnx: detections; efficientnms: TensorRT's plugin; none: all boxes and scores "
            "(default: onnx; of pt2: none)",
            autocompletion=completer(NMS),
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="The raw heads, without decoding and NMS")
    ] = False,
    batch: Annotated[
        str, typer.Option("--batch", metavar="N|dynamic", help="Pictures of a call")
    ] = "dynamic",
    fp16: Annotated[
        bool, typer.Option("--fp16", help="Weights in half precision; the arithmetic is fp32")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="ONNX: quantize; AP, size and latency are printed")
    ] = False,
    calibrate: Annotated[
        int | None,
        typer.Option(
            "--calibrate",
            metavar="N",
            min=1,
            help=f"Pictures for the ranges of int8 (default: {CALIBRATION_PICTURES})",
        ),
    ] = None,
    max_ap_loss: Annotated[
        float | None,
        typer.Option(
            "--max-ap-loss",
            metavar="X",
            min=0,
            max=1,
            help=f"Write no int8 file that loses more AP (default: {MAX_AP_LOSS})",
        ),
    ] = None,
) -> None:
    """Write a checkpoint for another runtime or program: ONNX, OpenVINO, torch.export, MLPerf, ...

    Before a file for another runtime is written, its output on images of the dataset is compared
    with PyTorch's; an int8 file is scored on the dataset. --nms, --raw, --batch and --fp16 apply to
    onnx, openvino and pt2.
    """
    if kind not in FORMATS:
        raise UsageError(f"--format: {kind!r} is not one of {', '.join(FORMATS)}")
    outputs = _outputs(kind, nms, raw)
    size = _batch_size(batch)
    _check_int8(kind, int8, fp16, calibrate is not None or max_ap_loss is not None)
    if kind not in GRAPH_FORMATS:
        for option, is_given in (("--batch", size is not None), ("--fp16", fp16)):
            if is_given:
                raise UsageError(f"{option} applies to {', '.join(GRAPH_FORMATS)}, not to {kind}")
    from ssdctl.inference.model_source import locate_checkpoint

    source = locate_checkpoint(checkpoint, mirror=call.config.download.mirror)
    if Path(out).exists() and Path(out).samefile(source):
        raise UsageError(f"--out {out} is the checkpoint itself", hint="give another file")
    from ssdctl.checkpoint.reader import read_checkpoint  # imports torch
    from ssdctl.export.formats import export as write
    from ssdctl.export.nvidia import NUM_CLASSES as NVIDIA_CLASSES

    content = read_checkpoint(source)
    result: dict[str, Any] = {"file": out, "format": kind}
    if kind in GRAPH_FORMATS:
        from ssdctl.export.deployed import ExportOptions

        settings = call.config.evaluate
        options = ExportOptions(outputs, size, fp16, settings.score_threshold, settings.nms_iou)
        if int8:
            limits = (
                calibrate or CALIBRATION_PICTURES,
                MAX_AP_LOSS if max_ap_loss is None else max_ap_loss,
            )
            result |= _export_int8(call, content, Path(out), options, *limits)
        else:
            result |= _export_graph(call, content, kind, Path(out), options)
    else:
        write(content, kind, Path(out))
        if kind == "nvidia" and content.architecture.num_classes != NVIDIA_CLASSES:
            call.console.warning(
                f"NVIDIA's program builds a network of {NVIDIA_CLASSES} outputs (COCO's), this "
                f"file has {content.architecture.num_classes}: only ssdctl reads it"
            )
    call.console.result(result, f"{source} -> {out} ({kind})")


def _outputs(kind: str, nms: str | None, raw: bool) -> Nms:
    """Return the outputs of a graph; see `ssdctl.export.deployed`."""
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


def _batch_size(text: str) -> int | None:
    """Return the pictures of a call; None: any number."""
    if text == "dynamic":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_BATCH:
        raise UsageError(f"--batch {text}: expected `dynamic` or a number up to {MAX_BATCH}")
    return int(text)


def _check_int8(kind: str, int8: bool, fp16: bool, is_configured: bool) -> None:
    if is_configured and not int8:
        raise UsageError("--calibrate and --max-ap-loss apply to --int8")
    if int8 and kind != "onnx":
        raise UsageError(f"--int8 applies to --format onnx, not to {kind}")
    if int8 and fp16:
        raise UsageError("give either --int8 or --fp16")


def _export_int8(
    call: Call,
    checkpoint: Checkpoint,
    out: Path,
    options: ExportOptions,
    num_pictures: int,
    max_ap_loss: float,
) -> dict[str, Any]:
    import msgspec

    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.evaluate.checkpoint import choose_data
    from ssdctl.export.formats import training_pictures
    from ssdctl.export.int8 import int8_model
    from ssdctl.files import write_bytes

    data = choose_data(checkpoint, call.config.data, call.resolved.explicit_settings())
    pictures = training_pictures(*dataset_folders(data), num_pictures)
    config = msgspec.structs.replace(call.config, data=data)
    quantized = int8_model(
        checkpoint,
        options,
        pictures,
        config,
        max_ap_loss=max_ap_loss,
        progress=call.console.progress,
    )
    write_bytes(out, quantized.content)
    for name, cost in (("fp32", quantized.before), ("int8", quantized.after)):
        call.console.info(
            f"{name}: AP {cost.ap:.4f}, {cost.size / 1e6:.1f} MB, {cost.latency_ms:.1f} ms a call"
        )
    call.console.info(f"ranges from {len(pictures)} pictures; heads in {quantized.heads}")
    return {
        "nms": options.nms,
        "batch": options.batch or "dynamic",
        "heads": quantized.heads,
        "pictures": len(pictures),
        "before": quantized.before._asdict(),
        "after": quantized.after._asdict(),
    }


def _export_graph(
    call: Call, checkpoint: Checkpoint, kind: str, out: Path, options: ExportOptions
) -> dict[str, Any]:
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.evaluate.checkpoint import choose_data
    from ssdctl.export.formats import export_graph

    given = call.resolved.explicit_settings()
    data = dataset_folders(choose_data(checkpoint, call.config.data, given))
    comparison, pictures = export_graph(checkpoint, kind, out, data, options)
    call.console.info(
        f"{RUNTIMES[kind]} agrees with PyTorch on {comparison.pictures} images ({pictures}): "
        f"largest difference of boxes {comparison.box_difference:.1g} of the image size, of scores "
        f"{comparison.score_difference:.1g}"
    )
    return {
        "nms": options.nms,
        "batch": options.batch or "dynamic",
        "fp16": options.is_fp16,
        **comparison._asdict(),
    }
