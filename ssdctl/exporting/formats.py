"""Write checkpoints in other formats: safetensors, for other runtimes, for third-party programs."""

from __future__ import annotations

import io
import itertools
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ssdctl.checkpoint.contents import Checkpoint
from ssdctl.checkpoint.third_party import label_map, to_third_party
from ssdctl.data import shapes
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store import open_splits
from ssdctl.errors import DataError, UsageError, missing_package
from ssdctl.exporting import nvidia
from ssdctl.exporting.deployed import (
    Comparison,
    Deployed,
    ExportOptions,
    Images,
    Reference,
    example,
)
from ssdctl.exporting.onnx import description, onnx_model
from ssdctl.exporting.openvino import write_openvino
from ssdctl.files import atomic_write, write_bytes
from ssdctl.inference.image_detector import open_image, resized

log = logging.getLogger(__name__)
NUM_IMAGES = 5  # an ONNX file is compared with PyTorch on them
MAX_TRIED = 10  # images of the dataset that are opened for each of them
PT2_METADATA = "ssdctl.json"
PT2_MAX_BATCH = 65_536
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}


def export(checkpoint: Checkpoint, kind: str, target: Path) -> None:
    """Write `safetensors` (our weights and class names), or a file for `mlperf` or `nvidia`.

    Raises:
        UsageError: The third-party program has no such network, or a package is absent.
        IntegrityError: The optimizer state does not fit the network.
    """
    if kind == "safetensors":
        _write_safetensors(checkpoint, target)
        return
    if checkpoint.architecture.backbone == "vgg16":
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network is a ResNet, this one is a VGG16",
            hint="--format onnx and --format safetensors write any network",
        )
    if checkpoint.architecture.extra_norm != EXTRA_NORM[kind]:
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network has extra blocks with "
            f"extra_norm={EXTRA_NORM[kind]}, this one has {checkpoint.architecture.extra_norm}",
            hint=f"--format {_format_of(checkpoint)} fits this network; for {kind} train one with "
            f"--extra-norm {EXTRA_NORM[kind]}",
        )
    names = label_map(checkpoint.classes)
    payload = {"model": to_third_party(checkpoint.model, kind), "label_map": names}
    if kind == "nvidia":
        payload |= nvidia.training_state(checkpoint)
        if checkpoint.architecture.num_classes != nvidia.NUM_CLASSES:
            log.warning(
                "NVIDIA's program builds a network of %d outputs (COCO's), this file has %d: only "
                "ssdctl reads it",
                nvidia.NUM_CLASSES,
                checkpoint.architecture.num_classes,
            )
    with atomic_write(target) as file:
        torch.save(payload, file)


def _format_of(checkpoint: Checkpoint) -> str:
    return next(k for k, norm in EXTRA_NORM.items() if norm == checkpoint.architecture.extra_norm)


def _write_safetensors(checkpoint: Checkpoint, target: Path) -> None:
    metadata = {
        "architecture": json.dumps(checkpoint.architecture._asdict()),
        "classes": json.dumps(msgspec.to_builtins(checkpoint.classes)),
        "step": json.dumps(checkpoint.step),
        "epoch": json.dumps(checkpoint.epoch),
    }
    write_bytes(target, safetensors_bytes(checkpoint.model, metadata))


def safetensors_bytes(state: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError:
        raise missing_package("safetensors", "safetensors") from None
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content


def export_graph(
    checkpoint: Checkpoint, kind: str, target: Path, data: tuple[Path, Path], options: ExportOptions
) -> tuple[Comparison, str]:
    """Write `onnx`, `openvino` or `pt2` if it gives PyTorch's outputs on images of a dataset.

    The images are generated if the folders of `data`, the dataset and its store, are absent.
    Return the largest differences, and the source of the images.

    Raises:
        UsageError: A package is absent, or the file name does not suit the format.
        IntegrityError: The outputs differ.
    """
    images, source = images_of(*data)
    if kind == "openvino":
        return write_openvino(checkpoint, target, images, options), source
    convert = onnx_model if kind == "onnx" else pt2_program
    content, comparison = convert(checkpoint, images, options)
    write_bytes(target, content)
    return comparison, source


def pt2_program(
    checkpoint: Checkpoint, images: Images, options: ExportOptions
) -> tuple[bytes, Comparison]:
    """Return the network as a `.pt2` file; compared with PyTorch after it is loaded again.

    The description of the detector is the extra file `ssdctl.json`.
    """
    # torch 2.6 refuses a batch without a limit.
    dynamic = (
        None if options.batch else {"images": {0: torch.export.Dim("batch", max=PT2_MAX_BATCH)}}
    )
    with torch.inference_mode(False), torch.no_grad():
        program = torch.export.export(
            Deployed(checkpoint, options), (example(options),), dynamic_shapes=dynamic
        )
    file = io.BytesIO()
    metadata = msgspec.json.encode(description(checkpoint, options)).decode()
    torch.export.save(program, file, extra_files={PT2_METADATA: metadata})
    file.seek(0)
    loaded = torch.export.load(file).module()
    reference = Reference(checkpoint, images, options, "torch.export")
    comparison = reference.check_outputs(
        lambda part: [output.numpy() for output in loaded(torch.from_numpy(part))]
    )
    return file.getvalue(), comparison


def images_of(root: Path, store: Path) -> tuple[NDArray[np.uint8], str]:
    """Return images to compare two programs on, and their source."""
    images = _of_dataset(root, store)
    if len(images) == NUM_IMAGES:
        return np.stack(images), str(root)
    with tempfile.TemporaryDirectory(prefix="ssdctl-export-") as folder:
        generated = Path(folder)
        shapes.generate(generated, num_train=1, num_val=NUM_IMAGES)
        return np.stack(_opened(sorted((generated / "val2017").iterdir()))), "generated shapes"


def training_images(root: Path, store: Path, count: int) -> NDArray[np.uint8]:
    """Return (P, 300, 300, 3) images of the training split, evenly spaced; at most `count`."""
    images = _of_dataset(root, store, count, ("train", "val"))
    if not images:
        raise DataError(
            f"{root}: no images for the calibration of int8",
            hint="name the dataset: --data DIR; `ssdctl prepare` checks it",
        )
    return np.stack(images)


def _of_dataset(
    root: Path, store: Path, count: int = NUM_IMAGES, names: tuple[str, ...] = ("val", "train")
) -> list[NDArray[np.uint8]]:
    """Return images that open: the store's or, without a store, those of the annotations."""
    try:
        try:
            splits = open_splits(root, store)
        except DataError:
            read = annotations_of(root, store)
            part = next(read[name] for name in names if name in read)
            return _opened((part.folder / name for name in sorted(part.file_names)), count)
        split = next(splits[name] for name in names if name in splits)
        rows = range(0, len(split.image_ids), max(len(split.image_ids) // count, 1))
        return _opened((io.BytesIO(split.read(row)) for row in rows), count)
    except (DataError, OSError, StopIteration):
        return []


def _opened(
    sources: Iterable[Path | IO[bytes]], count: int = NUM_IMAGES
) -> list[NDArray[np.uint8]]:
    """Return the first images that open."""
    images: list[NDArray[np.uint8]] = []
    for source in itertools.islice(sources, MAX_TRIED * count):
        try:
            images.append(resized(open_image(source)))
        except DataError:
            continue
        if len(images) == count:
            break
    return images
