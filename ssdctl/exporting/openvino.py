"""Export to OpenVINO's IR: `NAME.xml` and `NAME.bin`, converted from the ONNX graph.

The files are compared with PyTorch by OpenVINO on the CPU before they are written.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ssdctl.checkpoint import Checkpoint
from ssdctl.errors import UsageError, missing_package
from ssdctl.exporting import onnx
from ssdctl.exporting.deployed import Differences, ExportOptions, Images, Reference, Runner
from ssdctl.files import write_bytes
from ssdctl.inference.onnx_detector import DETECTIONS
from ssdctl.runtime.system import quota_cores

METADATA = "ssdctl"  # key of the runtime information in the file


def write_openvino(
    checkpoint: Checkpoint, target: Path, images: Images, options: ExportOptions
) -> Differences:
    """Write the network as IR, NAME.xml and NAME.bin, if OpenVINO gives PyTorch's outputs.

    Return the differences, also those without a hint for the precision (`default_*`).

    Raises:
        UsageError: OpenVINO is not installed, or the file has another suffix.
        IntegrityError: The outputs differ.
    """
    if target.suffix != ".xml":
        raise UsageError(f"{target}: OpenVINO reads NAME.xml and NAME.bin", hint="--out NAME.xml")
    onnx.require_onnx()
    try:
        import openvino
    except ImportError as error:
        raise missing_package(error.name, "openvino") from None
    reference = Reference(checkpoint, images, options, "OpenVINO")
    graph = onnx.network_graph(checkpoint, options)
    with _converted(openvino, graph, checkpoint, options) as file:
        compiled = _compiled(openvino, file, INFERENCE_PRECISION_HINT="f32")
        found = reference.check_outputs(_runner(compiled, options.output_names))
        compiled = _compiled(openvino, file)  # computes in bf16 where it can
        default = reference.compare(_runner(compiled, options.output_names))
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        found["default_precision"] = precision
        found |= {f"default_{name}": value for name, value in default.items()}
        if not options.has_nms:
            _publish(file, target)
            return found
    graph = onnx.with_nms(graph, checkpoint, options)
    with _converted(openvino, graph, checkpoint, options) as file:
        compiled = _compiled(openvino, file, INFERENCE_PRECISION_HINT="f32")
        reference.check_detections(_runner(compiled, DETECTIONS))
        _publish(file, target)
    return found


@contextmanager
def _converted(
    openvino: Any, graph: Any, checkpoint: Checkpoint, options: ExportOptions
) -> Iterator[Path]:
    """Yield the IR of an ONNX graph in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="ssdctl-export-") as folder:
        source, file = Path(folder) / "model.onnx", Path(folder) / "model.xml"
        source.write_bytes(graph.SerializeToString())
        model = openvino.convert_model(source)
        for key, value in onnx.description(checkpoint, options).as_metadata().items():
            model.set_rt_info(value, [METADATA, key])
        openvino.save_model(model, file, compress_to_fp16=options.is_fp16)
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
