"""Write the weights of a checkpoint as safetensors, or for the programs of MLPerf and NVIDIA.

NVIDIA's `main.py --checkpoint FILE` also loads the training state: into `torch.optim.SGD` with two
parameter groups (first biases and batch norm, without weight decay, then all other parameters) and
into a `MultiStepLR` that steps once per epoch, in evaluation as in training.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import MultiStepLR

from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.third_party import label_map, to_third_party
from ssdctl.errors import IntegrityError, UsageError, import_package
from ssdctl.files import atomic_write, write_bytes
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.optimizer import decay_groups, without_dynamo
from ssdctl.training.schedule import DECAY_FACTOR

log = logging.getLogger(__name__)
EXTRA_NORM = {"mlperf": "none", "nvidia": "batch"}
NVIDIA_CLASSES = 81  # fixed in NVIDIA's network


def export_weights(checkpoint: Checkpoint, kind: str, target: Path) -> None:
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
        payload |= training_state(checkpoint)
        if architecture.num_classes != NVIDIA_CLASSES:
            text = "NVIDIA's program builds a network of %d outputs (COCO's), this file has %d: "
            log.warning(text + "only ssdctl reads it", NVIDIA_CLASSES, architecture.num_classes)
    with atomic_write(target) as file:
        torch.save(payload, file)


def safetensors_bytes(state: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    save = import_package("safetensors.torch", "safetensors").save
    content: bytes = save({k: v.contiguous() for k, v in state.items()}, metadata)
    return content


class _Recipe(msgspec.Struct):
    """The settings of a checkpoint that the states contain. The defaults are NVIDIA's."""

    lr: float = 2.6e-3
    momentum: float = 0.9
    weight_decay: float = 5e-4
    decay_epochs: list[float] = msgspec.field(default_factory=lambda: [43.0, 54.0])
    lr_decay: str = "step"
    decay_bias: bool = False
    decay_norm: bool = False
    freeze_stem: bool = False


def training_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return `epoch`, `iteration`, `optimizer` and `scheduler` for a checkpoint of NVIDIA's.

    The learning rate is the one after the warm-up, and an epoch that is not complete is repeated.
    Momenta are included for the weights that SGD trained; those of a moving average (`--ema`), of
    AdamW and of third-party checkpoints do not exist and start at zero.

    Raises:
        IntegrityError: The optimizer's state does not fit the network, or a setting is not valid.
    """
    recipe = _recipe(checkpoint)
    with torch.device("meta"):
        model = checkpoint.architecture.build()
    named = sorted(model.named_parameters(), key=lambda item: item[1].dim() != 1)  # vectors first
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        {"params": [p for _, p in named if p.dim() != 1]},
    ]
    with without_dynamo():
        optimizer = torch.optim.SGD(
            groups,
            lr=recipe.lr * (checkpoint.global_batch or 32) / 32,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
    milestones = recipe.decay_epochs if recipe.lr_decay == "step" else _Recipe().decay_epochs
    scheduler = MultiStepLR(optimizer, [math.ceil(epoch) for epoch in milestones], DECAY_FACTOR)
    epoch = int(checkpoint.epoch)
    for group in optimizer.param_groups:
        group["lr"] *= DECAY_FACTOR ** sum(epoch >= milestone for milestone in milestones)
    momenta = _momenta(checkpoint, model, recipe)
    with without_dynamo():
        state = optimizer.state_dict()
    state["state"] = {
        index: {"momentum_buffer": momenta[name]}
        for index, (name, _) in enumerate(named)
        if name in momenta
    }
    return {
        "epoch": epoch,
        "iteration": checkpoint.step,
        "optimizer": state,
        "scheduler": scheduler.state_dict()
        | {
            "last_epoch": epoch,
            "_step_count": epoch + 1,
            "_last_lr": [group["lr"] for group in optimizer.param_groups],
        },
    }


def _recipe(checkpoint: Checkpoint) -> _Recipe:
    values = {
        path.removeprefix("train."): value
        for path, value in checkpoint.config.items()
        if path.startswith("train.")
    }
    try:
        return msgspec.convert(values, _Recipe)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"{checkpoint.path}: its config is not valid: {error}") from None


def _momenta(checkpoint: Checkpoint, model: SSD300, recipe: _Recipe) -> dict[str, Tensor]:
    """Return SGD's momentum by parameter name, on the CPU; empty if there is none."""
    saved = checkpoint.optimizer.get("state", {})
    if checkpoint.trained is not None or not any("momentum_buffer" in s for s in saved.values()):
        return {}
    if recipe.freeze_stem:
        model.freeze_stem()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = decay_groups(model, decay_bias=recipe.decay_bias, decay_norm=recipe.decay_norm)
    trained = [parameter for group in groups for parameter in group]
    momenta = {}
    for index, state in saved.items():
        momentum = state.get("momentum_buffer")
        if index >= len(trained) or not isinstance(momentum, Tensor):
            raise IntegrityError(f"{checkpoint.path}: its optimizer state has other parameters")
        parameter = trained[index]
        if momentum.shape != parameter.shape:
            raise IntegrityError(
                f"{checkpoint.path}: the momentum of {names[id(parameter)]} is "
                f"{tuple(momentum.shape)}, not {tuple(parameter.shape)}"
            )
        momenta[names[id(parameter)]] = momentum.contiguous()
    return momenta
