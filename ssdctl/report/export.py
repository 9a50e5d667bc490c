"""Checkpoints for other programs: the peers' formats and safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch

from ssdctl.errors import UsageError
from ssdctl.files import atomic_write
from ssdctl.model.peers import label_map, to_peer
from ssdctl.model.weights import Checkpoint

EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}


def export(checkpoint: Checkpoint, kind: str, target: Path) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: What to write.
        kind: `safetensors` (our weights and class names), `mlperf` or `nvidia`.
        target: The file, published atomically.

    Raises:
        UsageError: The peer has no such network, or a package is absent.
        DiskError: The file cannot be written.
    """
    if kind == "safetensors":
        _write_safetensors(checkpoint, target)
        return
    if checkpoint.architecture.extra_norm != EXTRA_NORM[kind]:
        raise UsageError(
            f"{checkpoint.path}: {kind}'s network has extra blocks with "
            f"extra_norm={EXTRA_NORM[kind]}, this one has {checkpoint.architecture.extra_norm}"
        )
    names = label_map(checkpoint.classes)
    payload = {"model": to_peer(checkpoint.model, kind), "label_map": names}
    if kind == "nvidia":
        payload |= {
            "epoch": int(checkpoint.epoch),
            "iteration": checkpoint.step,
            "optimizer": {},
            "scheduler": {},
        }
    with atomic_write(target) as file:
        torch.save(payload, file)


def _write_safetensors(checkpoint: Checkpoint, target: Path) -> None:
    try:
        from safetensors.torch import save
    except ImportError:
        raise UsageError(
            "the package safetensors is not installed", hint="pip install 'ssdctl[export]'"
        ) from None
    metadata = {
        "architecture": json.dumps(checkpoint.architecture._asdict()),
        "classes": json.dumps(msgspec.to_builtins(checkpoint.classes)),
    }
    content = save({k: v.contiguous() for k, v in checkpoint.model.items()}, metadata)
    with atomic_write(target) as file:
        file.write(content)
