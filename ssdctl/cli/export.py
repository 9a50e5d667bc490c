"""`ssdctl export`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.runs import newest_run
from ssdctl.cli.shell_completion import completer
from ssdctl.errors import UsageError
from ssdctl.exporting.request import (
    CALIBRATION_IMAGES,
    FORMATS,
    MAX_AP_LOSS,
    MAX_BATCH,
    NMS,
    ExportRequest,
    export_checkpoint,
)


@command(
    "export",
    short="--format --out --nms --batch --fp16 --int8 --data",
    panel="Results",
    settings="data.root evaluate.score_threshold evaluate.nms_iou evaluate.limit",
    examples=[
        "ssdctl export --format onnx --out ssd.onnx   # the newest run of runs/",
        "ssdctl export best.pt --format onnx --nms none --out opencv.onnx",
        "ssdctl export best.pt --format onnx --nms efficientnms --out trt.onnx",
        "ssdctl export best.pt --format onnx --int8 --calibrate 200 --out small.onnx",
        "ssdctl export best.pt --format openvino --fp16 --out ssd.xml",
        "ssdctl export best.pt --format pt2 --out ssd.pt2",
        "ssdctl export best.pt --format safetensors --out ssd.safetensors",
        "ssdctl export best.pt --format mlperf --out iter_120000.pt",
    ],
)
def export(
    call: Call,
    kind: Annotated[
        str,
        Option(
            "--format",
            metavar="FORMAT",
            help="onnx, openvino, pt2, safetensors, mlperf, nvidia",
            autocompletion=completer(FORMATS),
        ),
    ],
    out: Annotated[str, Option(metavar="FILE", help="File to write")],
    checkpoint: Annotated[
        str | None,
        Argument(
            metavar="CKPT|RUN",
            help="Checkpoint, run folder, detector, or hf://org/name [default: the newest run]",
        ),
    ] = None,
    nms: Annotated[
        str | None,
        Option(
            metavar="NMS",
            help="onnx, efficientnms (TensorRT), or none [default: onnx, pt2: none]",
            autocompletion=completer(NMS),
        ),
    ] = None,
    raw: Annotated[
        bool, Option("--raw", help="Export raw outputs, without decoding and NMS")
    ] = False,
    batch: Annotated[
        str, Option(metavar="N|dynamic", help="Batch size of the exported model")
    ] = "dynamic",
    fp16: Annotated[bool, Option("--fp16", help="Store weights in fp16, compute in fp32")] = False,
    int8: Annotated[
        bool, Option("--int8", help="ONNX: quantize, and print AP, size and latency")
    ] = False,
    calibrate: Annotated[
        int | None,
        Option(
            metavar="N", min=1, help=f"Calibration images for int8 [default: {CALIBRATION_IMAGES}]"
        ),
    ] = None,
    max_ap_loss: Annotated[
        float | None,
        Option(
            metavar="X", min=0, max=1, help=f"Fail if int8 loses more AP [default: {MAX_AP_LOSS}]"
        ),
    ] = None,
) -> None:
    """Export to ONNX, OpenVINO, torch.export and other formats.

    The exported model is compared with PyTorch before the file is written; an int8 model is
    evaluated on the dataset. --nms, --raw, --batch and --fp16 are for onnx, openvino and pt2.
    """
    request = ExportRequest(
        kind, Path(out), nms, raw, _batch_size(batch), fp16, int8, calibrate, max_ap_loss
    )
    source = checkpoint or newest_run(call.console)
    result = export_checkpoint(source, request, call.resolved, progress=call.console.progress)
    call.console.result(result, f"{result['source']} -> {out} ({kind})")
    megabytes = Path(out).stat().st_size / 1e6
    call.console.closing([("wrote", f"{out} ({megabytes:.1f} MB)")], [_next_command(request)])


def _next_command(request: ExportRequest) -> str:
    """Return a command that runs the file: only some formats are read by ssdctl."""
    out, size = shlex.quote(str(request.out)), request.batch or 1
    if request.format == "pt2":
        images = f"torch.zeros({size}, 300, 300, 3, dtype=torch.uint8)"
        program = f"torch.export.load({str(request.out)!r}).module()({images})"
        return "python -c " + shlex.quote(f"import torch; print([x.shape for x in {program}])")
    if request.format == "openvino":
        program = f"openvino.Core().compile_model({str(request.out)!r}, 'CPU')"
        return "python -c " + shlex.quote(f"import openvino; print({program})")
    if request.nms == "efficientnms":
        return f"trtexec --onnx={out} --saveEngine={shlex.quote(f'{request.out.stem}.engine')}"
    return f"ssdctl predict {out} photo.jpg --out drawn"


def _batch_size(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal():
        raise UsageError(f"--batch {text}: expected `dynamic` or a number up to {MAX_BATCH}")
    return int(text)
