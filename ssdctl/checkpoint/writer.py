"""The contents of a checkpoint, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ssdctl.checkpoint.reader import FORMAT, Architecture
from ssdctl.data.formats.coco import ClassName
from ssdctl.files import atomic_write


def payload(
    *,
    model: nn.Module,
    averaged: Mapping[str, torch.Tensor] | None,
    architecture: Architecture,
    classes: list[ClassName],
    config: dict[str, Any],
    step: int,
    samples_seen: int,
    images: int,
    global_batch: int,
    best_ap: float | None,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Return the contents of a checkpoint. Its tensors are the run's: copy them before a step."""
    trained = model.state_dict()
    return {
        "format": FORMAT,
        "model": trained if averaged is None else dict(averaged),  # to evaluate and deploy
        "trained": None if averaged is None else trained,  # to resume from, if it differs
        "architecture": architecture._asdict(),  # the network to build before loading the weights
        "classes": msgspec.to_builtins(classes),  # label = index + 1; ids are COCO's
        "config": config,  # every setting, resolved
        "step": step,  # optimizer steps done
        "samples_seen": samples_seen,  # position in the stream of samples
        "images": images,  # images per epoch
        "global_batch": global_batch,  # samples per step
        "best_ap": best_ap,  # so far
        "optimizer": optimizer.state_dict(),  # momentum and the like
    }


def write_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint atomically.

    Raises:
        DiskError: It cannot be written; an earlier file at `path` is unchanged.
    """
    with atomic_write(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # PyTorch's writer hides the OSError behind its own error
            raise _disk_error(error) from error


def _disk_error(error: RuntimeError) -> Exception:
    """Return the OSError that caused an error, or the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error
