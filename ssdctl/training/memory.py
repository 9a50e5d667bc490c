"""The device memory that a training step needs: for `--bs auto`, and for out-of-memory errors.

Activations kept for backward are counted on fake tensors, which have shapes but no memory, on any
machine. If the device reports its memory, `--bs auto` measures real steps once their kernels are
chosen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from ssdctl.checkpoint.format import Architecture
from ssdctl.config import Config, TrainConfig
from ssdctl.data.open_dataset import DatasetSize
from ssdctl.device import Device
from ssdctl.device.cpu import Cpu
from ssdctl.distributed import Ranks, collectives
from ssdctl.errors import UsageError
from ssdctl.input.open import random_batch
from ssdctl.model.ssd300 import network_of
from ssdctl.training.plan import Plan, check_shares, make_plan
from ssdctl.training.step import LossModule, build_step

log = logging.getLogger(__name__)
USED_SHARE = 0.9  # fraction of the memory; the rest is for fragmentation and workspaces
LARGE_PROBE = 48  # images at most; the difference to a third as many gives bytes per image
WORKSPACE = 1.15  # gradients of activations and workspaces, relative to saved activations


class MemoryEstimate(NamedTuple):
    """Memory: fixed (weights, gradients, optimizer) and per image, in bytes."""

    fixed: int
    per_image: int

    def fits(self, memory_bytes: int) -> int:
        """Return the largest batch for that much memory; a multiple of 8 if it is larger than 8."""
        most = int((USED_SHARE * memory_bytes - self.fixed) / self.per_image)
        return _rounded(max(most, 0))


def _rounded(images: int) -> int:
    return images - images % 8 if images > 8 else images


def estimate(architecture: Architecture, config: TrainConfig, precision: str) -> MemoryEstimate:
    with FakeTensorMode():
        model = network_of(architecture)
    parameters = sum(p.numel() for p in model.parameters())
    copies = 4 if config.optimizer == "adamw" else 3  # weights, gradients, state
    per_image = activation_bytes(architecture, precision)
    return MemoryEstimate(4 * copies * parameters, int(WORKSPACE * per_image))


def activation_bytes(architecture: Architecture, precision: str) -> int:
    two_images, three_images = (_saved_bytes(architecture, precision, size) for size in (2, 3))
    return three_images - two_images


def _saved_bytes(architecture: Architecture, precision: str, batch_size: int) -> int:
    seen: dict[StorageWeakRef, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen.setdefault(StorageWeakRef(storage), storage.nbytes())
        return tensor

    with FakeTensorMode():
        model = network_of(architecture).train()
        loss_module = LossModule(model, Cpu(), precision)
        batch = random_batch(batch_size, architecture.num_classes)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = loss_module(batch.images, batch.jitter, batch.boxes, batch.labels)[0]
        parameters = {StorageWeakRef(p.untyped_storage()) for p in model.parameters()}
        del loss
        return sum(size for ref, size in seen.items() if ref not in parameters)


def plan_on_device(
    config: Config,
    device: Device,
    ranks: Ranks,
    dataset: DatasetSize,
    num_classes: int,
    *,
    before: Config | None = None,
) -> Plan:
    """Plan a run on an open device, where `--bs auto` is measured; log what was replaced.

    Args:
        num_classes: Outputs of the network, the background included.
        before: See `make_plan`.
    """
    planned = functools.partial(make_plan, config, device, ranks, dataset, before=before)
    size = None
    if config.train.batch_size == "auto":
        trial = planned(largest_batch=2)  # for its network, precision and optimizer
        architecture = architecture_of(trial.config, num_classes)
        size = largest_batch(trial.config.train, architecture, device, ranks, trial.precision)
    plan = planned(largest_batch=size)
    check_shares(plan.batch_size, device.num_cores, device.name)
    for notice in plan.notices:
        log.warning("%s", notice)
    return plan


def architecture_of(config: Config, num_classes: int) -> Architecture:
    return Architecture(config.model.backbone, config.model.extra_norm, num_classes)


def largest_batch(
    config: TrainConfig, architecture: Architecture, device: Device, ranks: Ranks, precision: str
) -> int:
    """Return the batch size of `--bs auto`, the same on every rank.

    Raises:
        UsageError: The device does not report its memory, or not even one image fits.
    """
    memory = None if device.is_host else device.memory_bytes()
    if memory is None:
        raise UsageError(
            f"--bs auto: device {device.name} does not report a memory of its own",
            hint="give a number, as in --bs 8",
        )
    fits = _measure_largest_batch(config, architecture, device, precision, memory)
    fits = collectives.broadcast(min(collectives.gather_to_first(fits, ranks), default=0), ranks)
    if fits < 1:
        raise UsageError(
            f"--bs auto: {architecture.backbone} does not fit into {memory / 1e9:.1f} GB",
            hint="choose a smaller --backbone, or give a number, as in --bs 2",
        )
    return max(fits - fits % device.num_cores, device.num_cores)


def _measure_largest_batch(
    config: TrainConfig, architecture: Architecture, device: Device, precision: str, memory: int
) -> int:
    """Extrapolate the largest batch from the peaks of two small ones; 0 if these do not fit."""
    likely = estimate(architecture, config, precision).fits(memory)
    large = min(max(likely // 2, 6), LARGE_PROBE)  # a third of it is 2: batch norm needs two
    peaks = {}
    try:
        for size in (large // 3, large):
            _free_memory(device)
            peaks[size] = _peak(size, config, architecture, device, precision)
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        return 0
    _free_memory(device)
    (less, low), (more, high) = peaks.items()
    per_image = (high - low) / (more - less)
    if per_image <= 1:
        raise UsageError(
            f"--bs auto: {device.name} measures no memory that grows with the batch",
            hint="give a number: --bs 32",
        )
    return MemoryEstimate(int(low - less * per_image), int(per_image)).fits(memory)


def _peak(
    size: int, config: TrainConfig, architecture: Architecture, device: Device, precision: str
) -> int:
    model = device.place(network_of(architecture)).train()
    step = build_step(model, config, device, precision)
    batch = random_batch(size, architecture.num_classes)
    step([batch], 0.0)  # compiles, and tries kernels that may need more than the chosen ones
    device.synchronize()
    device.release_memory()
    step([batch], 0.0)  # CUDA graphs record this one, so it includes their memory
    device.synchronize()
    return device.peak_memory_bytes()


def _free_memory(device: Device) -> None:
    """Free unused networks: compiled ones keep themselves and their graphs alive."""
    if device.execution == "compile":
        torch.compiler.reset()
    gc.collect()
    device.release_memory()


@contextlib.contextmanager
def out_of_memory_hints(plan: Plan, architecture: Architecture, device: Device) -> Iterator[None]:
    """Replace an out-of-memory error by a UsageError that proposes a `--bs` that fits."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not device.is_out_of_memory(error):
            raise
        config, batch_size = plan.config.train, plan.batch_size
        need = estimate(architecture, config, plan.precision)
        raise UsageError(
            f"out of memory on device {device.name} ({device.label}) at --bs {batch_size}",
            hint=_proposal(need, batch_size, config.accumulate, device),
        ) from error


def _proposal(need: MemoryEstimate, tried: int, accumulate: int, device: Device) -> str:
    """Return a `--bs` that fits: the counted one, or half if the count or the memory says nothing.

    If the batch that failed fits by the count, the device's software or another process needs the
    rest of the memory.
    """
    if tried == 1:
        return "not even one image fits: choose a smaller --backbone, or --bf16"
    memory = device.memory_bytes()
    fits = need.fits(memory) if memory else tried
    is_counted = fits < tried
    fits = max(fits if is_counted else _rounded(tried // 2), 1)
    more = -(-tried * accumulate // fits)
    same = f"with --accumulate {more} the global batch stays about the same"
    if is_counted:
        return f"--bs {fits} would fit; {same}"
    counted = (need.fixed + tried * need.per_image) / 1e9
    remedy = "" if device.is_host else " (--bs auto measures it)"
    return (
        f"--bs {fits}, half of it: network and activations need {counted:.1f} GB, and how much "
        f"else the device needs is unknown{remedy}; {same}"
    )
