"""Export a checkpoint as a call requests: `ssdctl export`, `ssdctl.export`. Imports torch late."""

from __future__ import annotations

import json
import logging
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec

from ssdctl.config import Config
from ssdctl.config.call import whole_number
from ssdctl.config.settings import Kind
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError, UsageError, import_package
from ssdctl.files import (
    atomic_write,
    remove_stale_temporaries,
    require_own_file,
    write_bytes,
)
from ssdctl.runtime.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ssdctl.checkpoint.format import NetworkWeights
    from ssdctl.checkpoint.locate import Named
    from ssdctl.exporting.deployed import Outputs

log = logging.getLogger(__name__)
GRAPH_FORMATS = ("onnx", "openvino", "pt2")
FORMATS = (*GRAPH_FORMATS, "safetensors", "mlperf", "nvidia")
# The suffixes that ssdctl and other programs expect.
SUFFIXES = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2", "safetensors": ".safetensors"}
# Regular expressions of earlier exports, by what only ssdctl writes.
EARLIER = {
    "onnx": r"(?s)\x08.*producer..ssdctl",
    "openvino": r"(?s)<\?xml.*<ssdctl>",
    "pt2": r"(?s)PK.*/ssdctl\.json",
    "safetensors": r'(?s).{8}\{"__metadata__":.*"architecture":"\{\\"backbone\\"',
    **dict.fromkeys(("mlperf", "nvidia"), r"(?s)PK.*producer.{7}ssdctl"),
}
GRAPH_OPTIONS = ("raw", "nms", "batch", "fp16")
NMS = ("onnx", "efficientnms", "none")
ALLOWED_NMS = {"openvino": ("onnx", "none"), "pt2": ("none",)}  # other formats: all; default first
NMS_SETTINGS = ("evaluate.score_threshold", "evaluate.nms_iou")
MAX_BATCH = 4096
CALIBRATION_IMAGES = 128
MAX_AP_LOSS = 0.01
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}
NVIDIA_CLASSES = 81  # fixed in NVIDIA's network


class ExportRequest(NamedTuple):
    """The options of `ssdctl export`."""

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
    checkpoint: Named, request: ExportRequest, config: Config, *, progress: Progress
) -> dict[str, Any]:
    """Write a checkpoint in another format; return the file, its source, and the comparison.

    Raises:
        UsageError: The options do not fit the format, or the network, or a package is missing.
        IntegrityError: The checkpoint is damaged, or the outputs differ from PyTorch's.
    """
    request = _with_plain_integers(request)
    outputs = _check(request)
    _check_settings(request, outputs, config)
    _check_suffix(request)
    source = _find_source(checkpoint, request.format, request.out, config)
    from ssdctl.checkpoint.file import load_checkpoint  # imports torch
    from ssdctl.evaluation.choices import choose_data
    from ssdctl.exporting import graphs, int8
    from ssdctl.exporting.deployed import Deployment

    names = request.out.name, request.out.with_suffix(".bin").name
    remove_stale_temporaries(request.out.parent, *names)
    content = load_checkpoint(source)
    result: dict[str, Any] = {"file": str(request.out), "format": request.format}
    result["source"] = str(content.path)
    if request.format not in GRAPH_FORMATS:
        export_weights(content, request.format, request.out)
        return result
    thresholds = config.evaluate.score_threshold, config.evaluate.nms_iou
    deployment = Deployment(content, outputs, request.batch, request.fp16, *thresholds)
    try:
        data = choose_data(content, config)
    except DataError:  # a graph is compared on generated images, too
        if request.int8:
            raise
        data = config.data
    result |= {"nms": outputs, "batch": request.batch or "dynamic"}
    if not request.int8:
        folders = dataset_folders(data)
        return result | graphs.export_graph(deployment, request.format, request.out, folders)
    return result | int8.write_int8(
        deployment,
        request.out,
        msgspec.structs.replace(config, data=data),
        num_images=CALIBRATION_IMAGES if request.calibrate is None else request.calibrate,
        max_ap_loss=MAX_AP_LOSS if request.max_ap_loss is None else request.max_ap_loss,
        progress=progress,
    )


def _find_source(checkpoint: Named, kind: str, out: Path, config: Config) -> Path | nn.Module:
    from ssdctl.checkpoint.locate import locate_checkpoint

    source = locate_checkpoint(checkpoint, mirror=config.download.mirror)
    for file in (out, *[out.with_suffix(".bin")] * (out.suffix == ".xml")):
        if isinstance(source, Path) and file.exists() and file.samefile(source):
            raise UsageError(f"{file}: is the checkpoint itself", hint="give another file")
    is_new = not out.exists() or not out.stat().st_size
    if is_new and out.suffix == ".xml" and out.with_suffix(".bin").exists():
        raise UsageError(f"{out.with_suffix('.bin')} exists", hint="give --out another name")
    require_own_file(out, "--out", EARLIER[kind])
    return source


def expected_suffix(request: ExportRequest) -> str:
    """Return the suffix of a format; for others, that of the file unless it is of a format."""
    own = request.out.suffix
    return SUFFIXES.get(request.format, ".pt" if own in SUFFIXES.values() else own)


def _check_suffix(request: ExportRequest) -> None:
    suffix = expected_suffix(request)
    if request.out.suffix == suffix:
        return
    problem = f"{request.out}: the name of a file in this format ends in {suffix}"
    if request.format == "openvino":  # it reads NAME.xml and NAME.bin
        raise UsageError(problem, hint=f"--out {request.out.with_suffix(suffix)}")
    log.warning("%s: ssdctl and other programs may not recognize it", problem)


def _with_plain_integers(request: ExportRequest) -> ExportRequest:
    given = dict[str, Any]()
    for name, most in ("batch", MAX_BATCH), ("calibrate", None):
        if (value := getattr(request, name)) is not None:
            given[name] = whole_number(name, value, most)
    return request._replace(**given)


def _check(request: ExportRequest) -> Outputs:
    """Refuse options that do not fit the format; return the outputs of its graph."""
    kind, nms = request.format, request.nms
    if kind not in FORMATS:
        raise UsageError(f"format: {kind!r} is not one of {', '.join(FORMATS)}")
    if request.out.is_dir():
        raise UsageError(f"{request.out}: is a folder", hint="give the name of a file in it")
    defaults = ExportRequest._field_defaults
    given = [name for name in GRAPH_OPTIONS if getattr(request, name) != defaults[name]]
    if given and kind not in GRAPH_FORMATS:
        raise UsageError(f"{', '.join(given)}: for {', '.join(GRAPH_FORMATS)}, not for {kind}")
    loss: object = request.max_ap_loss
    if loss is not None and not (isinstance(loss, numbers.Real) and 0 <= float(loss) <= 1):
        raise UsageError(f"max_ap_loss {loss!r}: expected a number from 0 to 1")
    if request.int8 and (kind != "onnx" or request.fp16):
        raise UsageError("int8 is for the format onnx, and not together with fp16")
    if not request.int8 and (request.calibrate is not None or request.max_ap_loss is not None):
        raise UsageError("calibrate and max_ap_loss are for int8")
    if request.raw and nms is not None:
        raise UsageError("raw leaves out NMS: give either raw or nms")
    allowed = ALLOWED_NMS.get(kind, NMS)
    if nms is not None and nms not in allowed:
        raise UsageError(f"nms {nms}: for {kind}, choose {' or '.join(allowed)}")
    return cast("Outputs", "raw" if request.raw else nms or allowed[0])


def _check_settings(request: ExportRequest, outputs: Outputs, config: Config) -> None:
    """Refuse settings of the call that do not change the file."""
    has_nms = request.format in GRAPH_FORMATS and outputs in ("onnx", "efficientnms")
    if config.sources["data.root"].kind is Kind.CALL and config.data.root:
        from ssdctl.data.image_files import require_root

        require_root(Path(config.data.root))
    if request.format not in GRAPH_FORMATS:
        reason = f"does not apply to {request.format}, which is not run before it is written"
        config.require_not_given(["data.root"], reason, "leave it out")
    if not (has_nms or request.int8):
        reason = "is for the NMS of a file, which this one does not have"
        config.require_not_given(NMS_SETTINGS, reason, "leave it out")
    if not request.int8:
        reason = "is the number of images on which an int8 model is evaluated"
        config.require_not_given(["evaluate.limit"], reason, "leave it out, or add --int8")


def export_weights(checkpoint: NetworkWeights, kind: str, target: Path) -> None:
    """Write `safetensors` (our weights and class names), or a file for `mlperf` or `nvidia`.

    Raises:
        UsageError: The third-party program has no such network, or a package is absent.
    """
    import torch

    from ssdctl.checkpoint.exported import describe_network
    from ssdctl.checkpoint.third_party import backbone_of, label_map, to_third_party

    architecture = checkpoint.architecture
    if kind == "safetensors":
        facts = describe_network(checkpoint).items()
        # `format` means the writer's framework here.
        metadata = {name: json.dumps(value) for name, value in facts if name != "format"}
        write_bytes(target, safetensors_bytes(checkpoint.model, metadata))
        return
    if backbone_of(checkpoint.model) != architecture.backbone or architecture.backbone == "vgg16":
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network is a ResNet, this one is {architecture.backbone}",
            hint="--format onnx and --format safetensors write any network",
        )
    if architecture.extra_norm != EXTRA_NORM[kind]:
        fitting = next(k for k, norm in EXTRA_NORM.items() if norm == architecture.extra_norm)
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network has extra blocks with "
            f"extra_norm={EXTRA_NORM[kind]}, this one has {architecture.extra_norm}",
            hint=f"--format {fitting} fits this network; for {kind} train one with "
            f"--extra-norm {EXTRA_NORM[kind]}",
        )
    if kind == "nvidia" and architecture.num_classes != NVIDIA_CLASSES:
        text = "NVIDIA's program builds a network of %d outputs (COCO's), this file has %d: "
        log.warning(text + "only ssdctl reads it", NVIDIA_CLASSES, architecture.num_classes)
    if kind == "mlperf" and architecture.backbone != "resnet34":
        text = "Habana's and MLPerf's programs build a ResNet-34, this file has a %s: "
        log.warning(text + "only ssdctl reads it", architecture.backbone)
    weights = to_third_party(checkpoint.model, kind)
    names = label_map(checkpoint.classes)
    with atomic_write(target) as file:
        torch.save({"producer": "ssdctl", "model": weights, "label_map": names}, file)


def safetensors_bytes(state: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    save = import_package("safetensors.torch", "safetensors").save
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content
