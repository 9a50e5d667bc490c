"""`ssdctl export` and `ssdctl push`."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.help import completer
from ssdctl.cli.results import name_newest_run
from ssdctl.config import Config
from ssdctl.data.store_folder import refuse_in_dataset
from ssdctl.errors import UsageError
from ssdctl.exporting import (
    CALIBRATION_IMAGES,
    FORMATS,
    MAX_AP_LOSS,
    MAX_BATCH,
    NMS,
    ExportRequest,
    expected_suffix,
    export_checkpoint,
)
from ssdctl.runtime.safe_text import quoted

MESSAGE = "Upload an SSD300 trained with ssdctl"
SAMPLES = 4
ABOUT = {"license_id": "other", "data_license": None, "samples": SAMPLES}  # the defaults

Format = Annotated[
    str,
    Option(
        "--format",
        metavar="FORMAT",
        help="onnx, openvino, pt2, safetensors, mlperf, nvidia",
        autocompletion=completer(FORMATS),
    ),
]
CheckpointToExport = Annotated[
    str | None,
    Argument(
        metavar="CKPT|RUN",
        help="Checkpoint, run folder, detector, or hf://org/name [default: the newest run]",
    ),
]
Nms = Annotated[
    str | None,
    Option(
        metavar="NMS",
        help="onnx, efficientnms (TensorRT), or none [default: onnx, pt2: none]",
        autocompletion=completer(NMS),
    ),
]
CalibrationImages = Annotated[
    int | None,
    Option(metavar="N", min=1, help=f"Calibration images for int8 [default: {CALIBRATION_IMAGES}]"),
]
MaxApLoss = Annotated[
    float | None,
    Option(metavar="X", min=0, max=1, help=f"Fail if int8 loses more AP [default: {MAX_AP_LOSS}]"),
]
CheckpointToPush = Annotated[
    str, Argument(metavar="CKPT|RUN", help="Run folder, checkpoint, or a folder of push --out")
]
Repository = Annotated[
    str, Argument(metavar="hf://ORG/NAME", help="Model repository; created if it does not exist")
]
License = Annotated[
    str, Option("--license", metavar="ID", help="License of the weights, e.g. apache-2.0")
]
DataLicense = Annotated[str | None, Option(metavar="TEXT", help="License of the dataset")]
FolderInstead = Annotated[
    str | None, Option(metavar="DIR", help="Write the files to DIR without uploading")
]
Samples = Annotated[
    int, Option(min=0, max=50, metavar="N", help="Number of sample images with detections")
]


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
    kind: Format,
    out: Annotated[str, Option(metavar="FILE", help="File to write")],
    checkpoint: CheckpointToExport = None,
    nms: Nms = None,
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
    calibrate: CalibrationImages = None,
    max_ap_loss: MaxApLoss = None,
) -> None:
    """Export to ONNX, OpenVINO, torch.export and other formats.

    The exported model is compared with PyTorch before the file is written; an int8 model is
    evaluated on the dataset. --nms, --raw, --batch and --fp16 are for onnx, openvino and pt2.
    """
    request = ExportRequest(
        kind, Path(out), nms, raw, _batch_size(batch), fp16, int8, calibrate, max_ap_loss
    )
    if kind == "openvino":  # its XML file would be among the labels
        refuse_in_dataset(Path(out))
    checkpoint = checkpoint or name_newest_run(call.console)
    result = export_checkpoint(checkpoint, request, call.config, progress=call.console.progress)
    call.console.result(result, f"{result['source']} -> {out} ({kind})")
    files = [request.out, *[request.out.with_suffix(".bin")] * (kind == "openvino")]
    sizes = (f"{file} ({file.stat().st_size / 1e6:.1f} MB)" for file in files)
    command = _next_command(request, call.config)
    call.console.closing([("wrote", ", ".join(sizes))], [command] if command else [])


def _next_command(request: ExportRequest, config: Config) -> str:
    """Return a command that runs the file; empty if ssdctl does not read the format."""
    out, size = str(request.out), request.batch or 1
    if request.format == "pt2":
        images = f"torch.zeros({size}, 300, 300, 3, dtype=torch.uint8)"
        program = f"torch.export.load({out!r}).module()({images})"
        return "python -c " + shlex.quote(f"import torch; print([x.shape for x in {program}])")
    if request.format == "openvino":
        program = f"openvino.Core().compile_model({out!r}, 'CPU')"
        return "python -c " + shlex.quote(f"import openvino; print({program})")
    if request.nms == "efficientnms":
        engine = f"{request.out.stem}.engine"
        return f"trtexec --onnx={shlex.quote(out)} --saveEngine={shlex.quote(engine)}"
    if request.out.suffix != expected_suffix(request):
        return ""
    least = config.evaluate.score_threshold or 0  # the NMS in the file drops lower scores
    chosen = config.predict.score
    is_lower = isinstance(chosen, float) and chosen < least
    score = f" --score {least:g}" if is_lower else ""
    return f"ssdctl predict {quoted(out)} photo.jpg --out drawn{score}"


def _batch_size(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdecimal():
        raise UsageError(f"--batch {text}: expected `dynamic` or a number up to {MAX_BATCH}")
    return int(text)


@command(
    "push",
    panel="Results",
    settings="download.mirror",
    examples=[
        "ssdctl push runs/coco-resnet34 hf://org/name --license apache-2.0",
        "ssdctl push best.pt hf://org/name --license apache-2.0 --private",
        "ssdctl push runs/coco-resnet34 hf://org/name --out card   # upload nothing",
    ],
)
def push(
    call: Call,
    checkpoint: CheckpointToPush,
    target: Repository,
    license_id: License = "other",
    data_license: DataLicense = None,
    samples: Samples = SAMPLES,
    private: Annotated[bool, Option("--private", help="Create a private repository")] = False,
    message: Annotated[str, Option(metavar="TEXT", help="Commit message")] = MESSAGE,
    out: FolderInstead = None,
) -> None:
    """Publish a model on the Hugging Face Hub.

    The weights, a model card and sample images are uploaded. A folder that --out wrote is uploaded
    as it is, with your changes to the card. Log in with HF_TOKEN or
    `hf auth login`; HF_ENDPOINT selects another server.
    """
    from ssdctl.checkpoint.locate import is_model_folder
    from ssdctl.download.hub import hub_package, is_reference, parse_reference

    if not is_reference(target):
        raise UsageError(f"{target}: not a model repository", hint="expected hf://org/name")
    reference = parse_reference(target)
    if out is None:
        hub_package()
    else:
        refuse_in_dataset(Path(out))
    about = {"license_id": license_id, "data_license": data_license, "samples": samples}
    is_written = is_model_folder(Path(checkpoint)) and Path(checkpoint, "README.md").is_file()
    if is_written and (out is not None or about != ABOUT):
        raise UsageError(
            f"{checkpoint} is uploaded as it is: --license, --data-license, --samples and --out do "
            "not apply",
            hint="edit its README.md, or push the run or checkpoint instead",
        )
    if license_id == ABOUT["license_id"] and not is_written:
        call.console.warning("no --license: the card says `other`")
    result = {"repository": reference.repo, "url": None, "folder": out}
    with tempfile.TemporaryDirectory(prefix="ssdctl-push-") as temporary:
        folder = Path(checkpoint if is_written else out or temporary)
        repo = None if is_written else reference.repo
        names = _model_files(call, checkpoint, folder, repo, about)
        if out is not None:
            call.console.result({"files": names, **result}, f"{len(names)} files in {out}")
            again = ["ssdctl", "push", out, target, *["--private"] * private]
            again += [f"--message={message}"] * (message != MESSAGE)
            call.console.closing([("wrote", f"{out} (nothing was uploaded)")], [shlex.join(again)])
            return
        from ssdctl.exporting.hub import upload_folder  # imports torch

        url = upload_folder(reference, folder, names, is_private=private, message=message)
    call.console.result({"files": names, **result, "url": url}, f"{len(names)} files: {url}")
    call.console.closing([], [f"ssdctl predict {target} photo.jpg"])


def _model_files(
    call: Call, checkpoint: str, folder: Path, repo: str | None, about: dict[str, Any]
) -> list[str]:
    """Return the files to upload; they are written to `folder` unless `repo` is None."""
    from ssdctl.checkpoint.file import load_checkpoint
    from ssdctl.checkpoint.locate import locate_checkpoint
    from ssdctl.exporting.hub import model_files, write_model_folder
    from ssdctl.model.ssd300 import load_network

    content = load_checkpoint(locate_checkpoint(checkpoint, mirror=call.config.download.mirror))
    load_network(content)
    return write_model_folder(content, folder, repo=repo, **about) if repo else model_files(folder)
