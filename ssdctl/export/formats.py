"""Write checkpoints in other formats: safetensors, ONNX, third-party programs'."""

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
from ssdctl.data.dataset import find_splits
from ssdctl.data.store import open_split
from ssdctl.errors import DataError, UsageError, missing_package
from ssdctl.export import nvidia
from ssdctl.export.onnx import OnnxComparison, onnx_model
from ssdctl.files import atomic_write, write_bytes
from ssdctl.inference.predict import open_picture, resized

NUM_PICTURES = 5  # an ONNX file is compared with PyTorch on them
MAX_TRIED = 50  # images of the dataset that are opened to find as many
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


def export_onnx(
    checkpoint: Checkpoint,
    target: Path,
    data: tuple[Path, Path],
    *,
    has_nms: bool,
    score_threshold: float | None,
    nms_iou: float | None,
) -> tuple[OnnxComparison, str]:
    """Write an ONNX file if onnxruntime gives PyTorch's outputs on pictures of the dataset.

    Args:
        data: The dataset folder and the store; if both are absent, pictures are generated.

    Returns:
        The largest differences, and the source of the pictures.

    Raises:
        UsageError, IntegrityError: See `onnx_model`.
        DiskError: The file cannot be written.
    """
    pictures, source = pictures_of(*data)
    content, comparison = onnx_model(
        checkpoint,
        pictures,
        has_nms=has_nms,
        score_threshold=score_threshold,
        nms_iou=nms_iou,
    )
    write_bytes(target, content)
    return comparison, source


def pictures_of(root: Path, store: Path) -> tuple[NDArray[np.uint8], str]:
    """Return pictures to compare two programs on, and their source."""
    pictures = _of_dataset(root, store)
    if len(pictures) == NUM_PICTURES:
        return np.stack(pictures), str(root)
    with tempfile.TemporaryDirectory(prefix="ssdctl-export-") as folder:
        generated = Path(folder)
        shapes.generate(generated, num_train=1, num_val=NUM_PICTURES)
        return np.stack(_opened(sorted((generated / "val2017").iterdir()))), "generated shapes"


def _of_dataset(root: Path, store: Path) -> list[NDArray[np.uint8]]:
    """Return the first images that open: the store's or, without a store, the image folder's."""
    try:
        splits = find_splits(root, store)
        name = "val" if "val" in splits else "train"
        files = splits[name]
        try:
            split = open_split(store, name, files)
        except DataError:
            return _opened(sorted(files.images.iterdir()))
        rows = range(min(len(split.image_ids), MAX_TRIED))
        return _opened(io.BytesIO(split.read(row)) for row in rows)
    except (DataError, OSError):
        return []


def _opened(sources: Iterable[Path | IO[bytes]]) -> list[NDArray[np.uint8]]:
    pictures: list[NDArray[np.uint8]] = []
    for source in itertools.islice(sources, MAX_TRIED):
        try:
            pictures.append(resized(open_picture(source)))
        except DataError:
            continue
        if len(pictures) == NUM_PICTURES:
            break
    return pictures
