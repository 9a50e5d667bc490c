"""`ssdctl export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command, completer
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.checkpoint.reader import Checkpoint

FORMATS = ("onnx", "safetensors", "mlperf", "nvidia")


@command(
    app,
    "export",
    panel="Results",
    settings=["data.root", "evaluate.score_threshold", "evaluate.nms_iou"],
    examples=[
        "ssdctl export best.pt --format onnx --out ssd.onnx",
        "ssdctl export best.pt --format onnx --raw --out heads.onnx",
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
            help="onnx, safetensors, or a third-party format: mlperf, nvidia",
            autocompletion=completer(FORMATS),
            show_default=False,
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="File to write", show_default=False)
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="ONNX: the raw heads, without decoding and NMS")
    ] = False,
) -> None:
    """Write a checkpoint in another format: ONNX, safetensors, MLPerf's or NVIDIA's.

    Before an ONNX file is written, its output on images of the dataset is compared with PyTorch's.
    """
    if kind not in FORMATS:
        raise UsageError(f"--format: {kind!r} is not one of {', '.join(FORMATS)}")
    if raw and kind != "onnx":
        raise UsageError(f"--raw applies to --format onnx, not to {kind}")
    from ssdctl.inference.model_source import locate_checkpoint

    source = locate_checkpoint(checkpoint, mirror=call.config.download.mirror)
    if Path(out).exists() and Path(out).samefile(source):
        raise UsageError(f"--out {out} is the checkpoint itself", hint="give another file")
    from ssdctl.checkpoint.reader import read_checkpoint  # imports torch
    from ssdctl.export.formats import export as write
    from ssdctl.export.nvidia import NUM_CLASSES as NVIDIA_CLASSES

    content = read_checkpoint(source)
    result: dict[str, Any] = {"file": out, "format": kind}
    if kind == "onnx":
        result |= _export_onnx(call, content, Path(out), raw)
    else:
        write(content, kind, Path(out))
        if kind == "nvidia" and content.architecture.num_classes != NVIDIA_CLASSES:
            call.console.warning(
                f"NVIDIA's program builds a network of {NVIDIA_CLASSES} outputs (COCO's), this "
                f"file has {content.architecture.num_classes}: only ssdctl reads it"
            )
    call.console.result(result, f"{source} -> {out} ({kind})")


def _export_onnx(call: Call, checkpoint: Checkpoint, out: Path, raw: bool) -> dict[str, Any]:
    from ssdctl.data.store_folder import dataset_folders
    from ssdctl.evaluate.checkpoint import choose_data
    from ssdctl.export.formats import export_onnx

    settings = call.config.evaluate
    given = call.resolved.explicit_settings()
    data = dataset_folders(choose_data(checkpoint, call.config.data, given))
    comparison, pictures = export_onnx(
        checkpoint,
        out,
        data,
        has_nms=not raw,
        score_threshold=settings.score_threshold,
        nms_iou=settings.nms_iou,
    )
    call.console.info(
        f"onnxruntime agrees with PyTorch on {comparison.pictures} images ({pictures}): largest "
        f"difference of boxes {comparison.box_difference:.1g} of the image size, of scores "
        f"{comparison.score_difference:.1g}"
    )
    return {"raw": raw, **comparison._asdict()}
