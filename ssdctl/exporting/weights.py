"""Write the weights of a checkpoint as safetensors, or for the programs of MLPerf and NVIDIA."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ssdctl.checkpoint.exported import describe_network
from ssdctl.checkpoint.format import NetworkWeights
from ssdctl.checkpoint.third_party import label_map, to_third_party
from ssdctl.errors import UsageError, import_package
from ssdctl.files import atomic_write, write_bytes

log = logging.getLogger(__name__)
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}
NVIDIA_CLASSES = 81  # fixed in NVIDIA's network


def export_weights(checkpoint: NetworkWeights, kind: str, target: Path) -> None:
    """Write `safetensors` (our weights and class names), or a file for `mlperf` or `nvidia`.

    Raises:
        UsageError: The third-party program has no such network, or a package is absent.
    """
    architecture = checkpoint.architecture
    if kind == "safetensors":
        facts = describe_network(checkpoint).items()
        # `format` means the writer's framework here.
        metadata = {name: json.dumps(value) for name, value in facts if name != "format"}
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
    if kind == "nvidia" and architecture.num_classes != NVIDIA_CLASSES:
        text = "NVIDIA's program builds a network of %d outputs (COCO's), this file has %d: "
        log.warning(text + "only ssdctl reads it", NVIDIA_CLASSES, architecture.num_classes)
    weights = to_third_party(checkpoint.model, kind)
    with atomic_write(target) as file:
        torch.save({"model": weights, "label_map": label_map(checkpoint.classes)}, file)


def safetensors_bytes(state: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    save = import_package("safetensors.torch", "safetensors").save
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content
