"""Quantize an ONNX graph to int8; measure AP, size and latency before and after.

Static quantization by onnxruntime: QDQ format, weights per channel, activations by the ranges on
images of the training split. Decoding and NMS stay in fp32.
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ssdctl.checkpoint.file import read_model
from ssdctl.config import Config
from ssdctl.config.fields import Tiling
from ssdctl.data.image_decode import resized
from ssdctl.data.store_folder import dataset_folders
from ssdctl.data.tiles import tile_windows
from ssdctl.device import open_device
from ssdctl.errors import DataError, IntegrityError
from ssdctl.evaluation.evaluate import detect_on_split
from ssdctl.exporting import graphs
from ssdctl.exporting.deployed import Deployment, Images, Runner, dataset_images
from ssdctl.files import temporary_folder, write_bytes
from ssdctl.inference.onnx_detector import filled_batches
from ssdctl.runtime.progress import Progress

log = logging.getLogger(__name__)
CALIBRATION_BATCH = 8
LATENCY_RUNS = 11
QUANTIZED = ("Conv", "Relu", "MaxPool", "Add")
HEADS = ("box_heads", "class_heads")  # in the names of their weights


class Cost(NamedTuple):
    ap: float
    size: int  # bytes
    latency_ms: float  # a call without NMS, on the graph's batch or one image


def write_int8(
    deployment: Deployment,
    target: Path,
    config: Config,
    *,
    num_images: int,
    max_ap_loss: float,
    progress: Progress,
) -> dict[str, Any]:
    """Write an int8 file that loses at most `max_ap_loss`, with heads in fp32 if necessary.

    `num_images` of the training split give the ranges of the activations. Return what it costs,
    `before` and `after`.

    Raises:
        UsageError: The packages of the extra `onnx` are not installed.
        DataError: The dataset has no images, cannot be evaluated on, or has no objects.
        IntegrityError: The AP falls by more.
    """
    tiling = deployment.checkpoint.tiling
    calibration = _training_images(*dataset_folders(config.data), num_images, tiling)
    graphs.require_onnx()
    graph = graphs.network_graph(deployment)
    cost = functools.partial(_cost, deployment, config, progress)
    before = cost(graph, "fp32")
    for heads in ("int8", "fp32"):
        quantized = quantize(graph, calibration, deployment.batch, keep_heads=heads == "fp32")
        after = cost(quantized, "int8")
        if before.ap - after.ap <= max_ap_loss:
            break
    else:
        raise _too_large_loss(before, after, max_ap_loss)
    if deployment.has_nms:
        quantized = graphs.with_nms(quantized, deployment)
    write_bytes(target, graphs.with_metadata(quantized, deployment))
    for name, c in (("fp32", before), ("int8", after)):
        log.info("%s: AP %.4f, %.1f MB, %.1f ms per call", name, c.ap, c.size / 1e6, c.latency_ms)
    log.info("calibrated on %d images; heads in %s", len(calibration), heads)
    costs = {"before": before._asdict(), "after": after._asdict()}
    return {"heads": heads, "images": len(calibration), **costs}


def _too_large_loss(before: Cost, after: Cost, max_ap_loss: float) -> IntegrityError:
    return IntegrityError(
        f"int8 lowers the AP from {before.ap:.4f} to {after.ap:.4f}, by more than "
        f"{max_ap_loss}; nothing was written",
        hint="more images (--calibrate) may help; --max-ap-loss X accepts a larger loss",
    )


def _cost(
    deployment: Deployment, config: Config, progress: Progress, graph: Any, name: str
) -> Cost:
    """Measure a graph without NMS, which `predict` and `evaluate` add."""
    measured = deployment._replace(outputs="raw" if deployment.outputs == "raw" else "none")
    with temporary_folder("ssdctl-export-") as folder:
        path = folder / "model.onnx"
        path.write_bytes(graphs.with_metadata(graph, measured))
        device, checkpoint = open_device("cpu"), read_model(path)
        how: dict[str, Any] = {"progress": progress, "name": name, "fold_of": deployment.checkpoint}
        config = config.with_defaults({"evaluate.split": "val", "evaluate.annotated_only": False})
        found = detect_on_split(checkpoint, config, device, **how)
        assert found is not None  # a single process
        evaluation, size = found.score(verify=config.evaluate.verify), path.stat().st_size
    if (ap := evaluation.metrics["AP"]) < 0:
        raise DataError(
            "the loss of AP by int8 cannot be measured: the validation images have no objects",
            hint="name a dataset with annotated images: --data DIR",
        )
    return Cost(ap, size, _latency_ms(graphs.runner(graph), measured.batch))


def _training_images(root: Path, store: Path, count: int, tiling: Tiling | None) -> Images:
    """Return (P, 300, 300, 3) images, evenly spaced, or a tile of each; at most `count`."""
    images = []
    for number, image in enumerate(dataset_images(root, store, count, ("train", "val"))):
        windows = tile_windows(*image.size, tiling)
        images.append(resized(image, windows[number % len(windows)]))
    if not images:
        raise DataError(
            f"{root}: no images for the calibration of int8",
            hint="name the dataset: --data DIR; `ssdctl prepare` checks it",
        )
    return np.stack(images)


def quantize(graph: Any, calibration: Images, batch: int | None, *, keep_heads: bool) -> Any:
    """Return a graph with int8 convolutions; `keep_heads` leaves the heads in fp32."""
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    batches = iter(filled_batches(calibration, batch or CALIBRATION_BATCH))
    feeds = ({"images": images} for images in batches)
    with temporary_folder("ssdctl-export-") as folder:
        source, prepared, target = (folder / f"{n}.onnx" for n in ("source", "prepared", "q"))
        source.write_bytes(graph.SerializeToString())
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantization.quantize_static(
            prepared,
            target,
            SimpleNamespace(get_next=lambda: next(feeds, None)),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            # 7 bits: with 8, the sums of processors without VNNI overflow.
            reduce_range=True,
            op_types_to_quantize=list(QUANTIZED),
            nodes_to_exclude=_fp32_nodes(onnx.load(prepared), keep_heads),
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
        )
        quantized = onnx.load(target)
    graphs.clean_opsets(quantized)
    return quantized


def _fp32_nodes(model: Any, keep_heads: bool) -> list[str]:
    """Return the nodes that stay in fp32: all after the heads, and the heads if they are kept."""
    heads = [
        node
        for node in model.graph.node
        if node.op_type == "Conv" and any(name in node.input[1] for name in HEADS)
    ]
    assert len(heads) == 12  # six pairs
    makers = {output: node for node in model.graph.node for output in node.output}
    kept = set() if keep_heads else {node.name for node in heads}
    waiting = [name for node in heads for name in node.input]
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.name not in kept:
            kept.add(node.name)
            waiting += node.input
    return [node.name for node in model.graph.node if node.name not in kept]


def _latency_ms(run: Runner, batch: int | None) -> float:
    images = np.zeros((batch or 1, 300, 300, 3), np.uint8)
    times = []
    for _ in range(LATENCY_RUNS):
        start = time.perf_counter()
        run(images)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[1:])  # the first one allocates
