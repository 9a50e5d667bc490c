"""Write checkpoints in other formats: safetensors, for other runtimes, for third-party programs."""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ssdctl.checkpoint.reader import Checkpoint
from ssdctl.checkpoint.third_party import label_map, to_third_party
from ssdctl.data import shapes
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store import open_splits
from ssdctl.errors import DataError, UsageError, missing_package
from ssdctl.exporting import nvidia
from ssdctl.exporting.deployed import Comparison, ExportOptions
from ssdctl.exporting.onnx import onnx_model
from ssdctl.exporting.openvino import write_openvino
from ssdctl.exporting.pt2 import pt2_program
from ssdctl.files import atomic_write, write_bytes
from ssdctl.inference.predict import open_image, resized

NUM_PICTURES = 5  # an ONNX file is compared with PyTorch on them
MAX_TRIED = 10  # images of the dataset that are opened for each of them
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}


def export(checkpoint: Checkpoint, kind: str, target: Path) -> None:
    """Write a checkpoint in another format.

    Args:
        kind: `safetensors` (our weights and class names), `mlperf` or `nvidia`.
        target: The file, written atomically.

    Raises:
        UsageError: The third-party program has no such network, or a package is absent.
        IntegrityError: The optimizer state does not fit the network.
        DiskError: The file cannot be written.
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
    with atomic_write(target) as file:
        torch.save(payload, file)


def _format_of(checkpoint: Checkpoint) -> str:
    """Return the third-party format that has the extra blocks of a checkpoint."""
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
    """Return weights as a safetensors file.

    Raises:
        UsageError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise missing_package("safetensors", "safetensors") from None
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content


def export_graph(
    checkpoint: Checkpoint, kind: str, target: Path, data: tuple[Path, Path], options: ExportOptions
) -> tuple[Comparison, str]:
    """Write the network for another runtime if it gives PyTorch's outputs on images of a dataset.

    Args:
        kind: `onnx`, `openvino` or `pt2`.
        data: The dataset folder and the store; if both are absent, images are generated.
        options: What the file computes.

    Returns:
        The largest differences, and the source of the images.

    Raises:
        UsageError: A package is absent, or the file name does not suit the format.
        IntegrityError: The outputs differ.
        DiskError: The file cannot be written.
    """
    pictures, source = pictures_of(*data)
    if kind == "openvino":
        return write_openvino(checkpoint, target, pictures, options), source
    convert = onnx_model if kind == "onnx" else pt2_program
    content, comparison = convert(checkpoint, pictures, options)
    write_bytes(target, content)
    return comparison, source


def pictures_of(root: Path, store: Path) -> tuple[NDArray[np.uint8], str]:
    """Return images to compare two programs on, and their source."""
    pictures = _of_dataset(root, store)
    if len(pictures) == NUM_PICTURES:
        return np.stack(pictures), str(root)
    with tempfile.TemporaryDirectory(prefix="ssdctl-export-") as folder:
        generated = Path(folder)
        shapes.generate(generated, num_train=1, num_val=NUM_PICTURES)
        return np.stack(_opened(sorted((generated / "val2017").iterdir()))), "generated shapes"


def training_pictures(root: Path, store: Path, count: int) -> NDArray[np.uint8]:
    """Return (P, 300, 300, 3) images of the training split, evenly spaced; at most `count`.

    Raises:
        DataError: There is none.
    """
    pictures = _of_dataset(root, store, count, ("train", "val"))
    if not pictures:
        raise DataError(
            f"{root}: no pictures for the calibration of int8",
            hint="name the dataset: --data DIR; `ssdctl prepare` checks it",
        )
    return np.stack(pictures)


def _of_dataset(
    root: Path, store: Path, count: int = NUM_PICTURES, names: tuple[str, ...] = ("val", "train")
) -> list[NDArray[np.uint8]]:
    """Return images that open: the store's or, without a store, those of the annotations.

    Args:
        names: Splits, in the order of preference.
    """
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
    sources: Iterable[Path | IO[bytes]], count: int = NUM_PICTURES
) -> list[NDArray[np.uint8]]:
    """Return the first images that open."""
    pictures: list[NDArray[np.uint8]] = []
    for source in itertools.islice(sources, MAX_TRIED * count):
        try:
            pictures.append(resized(open_image(source)))
        except DataError:
            continue
        if len(pictures) == count:
            break
    return pictures
