"""Write checkpoints in other formats: safetensors, for other runtimes, for third-party programs."""

from __future__ import annotations

import io
import itertools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.third_party import label_map, to_third_party
from ssdctl.config import Config, DataConfig
from ssdctl.data import shapes
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store import open_splits
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError, UsageError, missing_package
from ssdctl.exporting import nvidia
from ssdctl.exporting.deployed import (
    Deployed,
    Differences,
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
RUNTIMES = {"onnx": "onnxruntime", "openvino": "OpenVINO", "pt2": "the loaded program"}
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}


def export(checkpoint: Checkpoint, kind: str, target: Path) -> None:
    """Write `safetensors` (our weights and class names), or a file for `mlperf` or `nvidia`.

    Raises:
        UsageError: The third-party program has no such network, or a package is absent.
        IntegrityError: The optimizer state does not fit the network.
    """
    architecture = checkpoint.architecture
    if kind == "safetensors":
        facts = {
            "architecture": architecture._asdict(),
            "classes": msgspec.to_builtins(checkpoint.classes),
            "step": checkpoint.step,
            "epoch": checkpoint.epoch,
        }
        metadata = {name: json.dumps(value) for name, value in facts.items()}
        write_bytes(target, safetensors_bytes(checkpoint.model, metadata))
        return
    if architecture.backbone == "vgg16":
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network is a ResNet, this one is a VGG16",
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
    names = label_map(checkpoint.classes)
    payload = {"model": to_third_party(checkpoint.model, kind), "label_map": names}
    if kind == "nvidia":
        payload |= nvidia.training_state(checkpoint)
        if architecture.num_classes != nvidia.NUM_CLASSES:
            log.warning(
                "NVIDIA's program builds a network of %d outputs (COCO's), this file has %d: only "
                "ssdctl reads it",
                nvidia.NUM_CLASSES,
                architecture.num_classes,
            )
    with atomic_write(target) as file:
        torch.save(payload, file)


def safetensors_bytes(state: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> bytes:
    try:
        from safetensors.torch import save
    except ImportError:
        raise missing_package("safetensors", "safetensors") from None
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content


def export_graph(
    checkpoint: Checkpoint, kind: str, target: Path, options: ExportOptions, config: Config
) -> dict[str, Any]:
    """Write `onnx`, `openvino` or `pt2` if it gives PyTorch's outputs on images of the dataset.

    The images are generated if there is no dataset. Return the largest differences.

    Raises:
        UsageError: A package is absent, or the file name does not suit the format.
        IntegrityError: The outputs differ.
    """
    images, source = images_of(*dataset_folders(config.data))
    if kind == "openvino":
        found = write_openvino(checkpoint, target, images, options)
    else:
        convert = onnx_model if kind == "onnx" else pt2_program
        content, found = convert(checkpoint, images, options)
        write_bytes(target, content)
    log.info(
        "%s agrees with PyTorch on %d images (%s): largest difference of boxes %.1g of the image "
        "size, of scores %.1g",
        RUNTIMES[kind],
        len(images),
        source,
        found["box_difference"],
        found["score_difference"],
    )
    if kind == "openvino":
        log.info(
            "with OpenVINO's default precision on this CPU (%s): boxes %.1g of the image size, "
            "scores %.1g; the agreement above is that of INFERENCE_PRECISION_HINT f32",
            found["default_precision"],
            found["default_box_difference"],
            found["default_score_difference"],
        )
    return {"fp16": options.is_fp16, "pictures": len(images), **found}


def pt2_program(
    checkpoint: Checkpoint, images: Images, options: ExportOptions
) -> tuple[bytes, Differences]:
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
    differences = reference.check_outputs(
        lambda images: [output.numpy() for output in loaded(torch.from_numpy(images))]
    )
    return file.getvalue(), differences


def images_of(root: Path, store: Path) -> tuple[Images, str]:
    """Return images to compare two programs on, and their source."""
    images = [*itertools.islice(dataset_images(root, store, NUM_IMAGES), NUM_IMAGES)]
    if len(images) == NUM_IMAGES:
        return np.stack([resized(image) for image in images]), str(root)
    with tempfile.TemporaryDirectory(prefix="ssdctl-export-") as folder:
        generated = Path(folder)
        shapes.generate(generated, num_train=1, num_val=NUM_IMAGES)
        files = sorted((generated / "val2017").iterdir())
        return np.stack([resized(open_image(file)) for file in files]), "generated shapes"


def training_images(data: DataConfig, count: int) -> Images:
    """Return (P, 300, 300, 3) images of the training split, evenly spaced; at most `count`."""
    root, store = dataset_folders(data)
    images = dataset_images(root, store, count, ("train", "val"))
    if not (pixels := [resized(image) for image in itertools.islice(images, count)]):
        raise DataError(
            f"{root}: no images for the calibration of int8",
            hint="name the dataset: --data DIR; `ssdctl prepare` checks it",
        )
    return np.stack(pixels)


def dataset_images(
    root: Path, store: Path, count: int, names: tuple[str, ...] = ("val", "train")
) -> Iterator[Image.Image]:
    """Yield images that open, of the store (about `count`, evenly spaced) or the annotations."""
    try:
        try:
            splits = open_splits(root, store)
        except DataError:
            read = annotations_of(root, store)
            own = next(read[name] for name in names if name in read)
            sources: Iterator[Any] = (own.folder / name for name in sorted(own.file_names))
        else:
            split = next(splits[name] for name in names if name in splits)
            rows = range(0, len(split.image_ids), max(len(split.image_ids) // count, 1))
            sources = (io.BytesIO(split.read(row)) for row in rows)
        for source in itertools.islice(sources, MAX_TRIED * count):
            try:
                image = open_image(source)
            except DataError:
                continue
            yield image
    except (DataError, OSError, StopIteration):
        return
