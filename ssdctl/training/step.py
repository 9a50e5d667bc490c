"""One optimizer step: color, network, targets, loss, backward, guard, update.

    step = build_step(model, config, device, precision, ranks)
    result = step(batches, lr)

A step does not wait for the device, which skips it if the loss or a gradient is NaN or infinite.
`NonFiniteGuard` reads that at log points and before saves, where the run waits anyway, and applies
the policy: continue (`skip`), restore the last checkpoint and continue after the offending images
(`rollback`), or end (`stop`). If steps are compiled, shapes never change, so that compilation
happens once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ssdctl.device import Device
from ssdctl.distributed import SINGLE_PROCESS, Ranks, collectives
from ssdctl.errors import NonFiniteError, UsageError
from ssdctl.input.normalize import Normalize
from ssdctl.model.backbones import constants_of_model
from ssdctl.model.loss import Losses, MultiboxLoss
from ssdctl.training.optimizer import (
    GuardedUpdate,
    LossScale,
    build_optimizer,
    clip_factor,
    groups_of,
    set_lr,
    update,
)

if TYPE_CHECKING:
    from ssdctl.config import TrainConfig
    from ssdctl.input.batch import Batch

MAX_CONSECUTIVE = 20  # bad steps, which end every run
MAX_ROLLBACKS = 10


class StepResult(NamedTuple):
    """Results of a step: scalars on the device, which may not be computed yet."""

    losses: Losses
    grad_norm: Tensor
    is_bad: Tensor  # 1.0 if the step was skipped, other than to find a loss scale

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Synchronize once and return the values; the losses are means over the ranks."""
        losses = collectives.average(torch.stack(list(self.losses)), ranks)
        values = torch.cat([losses, torch.stack([self.grad_norm, self.is_bad])]).tolist()
        names = ("loss", "loss_box", "loss_class", "grad_norm", "is_bad")
        return dict(zip(names, values, strict=True))


class LossModule(nn.Module):
    """Color, normalization, network, targets and loss: the part of a step that is compiled as one.

    All but the network computes in the precision of the weights.
    """

    def __init__(
        self, model: nn.Module, device: Device, precision: str, background_negatives: int = 0
    ) -> None:
        super().__init__()
        self._dtype = next(model.parameters()).dtype
        self.model = model
        constants = constants_of_model(model)
        self.normalize = Normalize(constants.mean, constants.std, self._dtype)
        self.normalize.to(device.torch_device)
        self.loss = MultiboxLoss(
            self._dtype, constants=constants, background_negatives=background_negatives
        ).to(device.torch_device)
        self.device = device
        self._precision = precision
        if device.forms:
            from ssdctl.model import fused  # late: the step of the paper does not need it

            fused.swap_in(self, device.forms)

    def forward(
        self, images_BHW3: Tensor, jitter_B4: Tensor | None, boxes_BG4: Tensor, labels_BG: Tensor
    ) -> Tensor:
        pixels = self.normalize(images_BHW3, jitter_B4)
        with self.device.autocast(self._precision):
            offsets, logits = self.model(pixels)
        losses: Losses = self.loss(offsets, logits, boxes_BG4.to(self._dtype), labels_BG)
        return torch.stack(list(losses))


def build_step(
    model: nn.Module,
    config: TrainConfig,
    device: Device,
    precision: str,
    ranks: Ranks = SINGLE_PROCESS,
) -> TrainStep:
    """Return the optimizer step of a network, in fp32, bf16, or fp16 with a loss scale."""
    optimizer = build_optimizer(model, config, device)
    scale = None
    if precision == "fp16":
        scale = LossScale(device)
        scale.attach_to(optimizer)
    negatives = config.background_negatives if config.background else 0
    module = LossModule(model, device, precision, negatives)
    return TrainStep(module, optimizer, config, ranks, scale)


class TrainStep:
    """A network, its loss and its optimizer, ready to step: made by `build_step`."""

    def __init__(
        self,
        loss_module: LossModule,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        ranks: Ranks,
        scale: LossScale | None,
    ) -> None:
        model, device = loss_module.model, loss_module.device
        self.optimizer = optimizer
        self._device = device
        self._ranks = ranks
        self._scale = scale
        self._clip = config.clip_grad
        self._all_parameters = list(model.parameters())
        self._parameters = [p for p in self._all_parameters if p.requires_grad]
        self._statistics = [b for b in model.buffers() if b.is_floating_point()]
        device.compile(loss_module, overlap=config.overlap_gradients)
        self._guarded_update = None
        if not device.supports_found_inf:
            assert scale is None
            self._guarded_update = GuardedUpdate(config.clip_grad)
            device.compile(self._guarded_update, overlap=config.overlap_gradients)
        # The gradients are either averaged by DistributedDataParallel, or added up afterwards.
        self._adds_up = ranks.world_size > 1 and device.ddp_bucket_mb is None
        self._loss_module = collectives.wrap(loss_module, ranks, device)

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Take one optimizer step on the mean of the micro-batches.

        A step with a non-finite loss or gradient on any rank is skipped: weights, momentum and the
        statistics of batch norm stay unchanged. All ranks make the same decision.
        """
        if sum(p.requires_grad for p in self._all_parameters) > len(self._parameters):
            raise UsageError(
                "layers that were frozen when training began would not be trained",
                hint="end the run, and train from its weights: init=RUN, freeze=0",
            )
        set_lr(self.optimizer, lr)
        self._clear_gradients(accumulate=len(batches) > 1)
        statistics = _flattened(self._statistics)
        parts = []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else self._without_sync():
                losses = self._loss_module(*_to_device(batch, self._device.torch_device))
                parts_of_mean = len(batches) * (self._ranks.world_size if self._adds_up else 1)
                loss = losses[0] / parts_of_mean
                (loss if self._scale is None else loss * self._scale.scale).backward()
            parts.append(losses.detach().clone())
            self._device.mark_step()
        mean = torch.stack(parts).mean(dim=0)
        loss = self._reduce(mean[0])
        if self._guarded_update is not None:
            before = _split(statistics, self._statistics)
            groups = groups_of(self.optimizer)
            norm, is_bad = self._guarded_update(groups, loss, self._statistics, before)
        else:
            norm, is_bad = self._fused_update(loss, statistics)
        self._device.mark_step()
        return StepResult(Losses(*mean), norm, is_bad)

    def _fused_update(self, loss: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Update with the device's fused kernels; return the norm and whether the step is bad."""
        norm, is_skipped = self._check_gradients(loss)
        if self._scale is None:
            update(self.optimizer, is_skipped, None)
            is_bad = is_skipped
        else:
            is_bad = is_skipped * (~self._scale.explains(loss)).float()
            update(self.optimizer, is_skipped, self._scale.scale)
            self._scale.adapt(is_skipped)
        if self._statistics:  # batch norm's: a skipped step leaves them as they were
            kept = torch.where(is_skipped > 0, statistics, _flattened(self._statistics))
            torch._foreach_copy_(self._statistics, _split(kept, self._statistics))
        return norm, is_bad

    def _clear_gradients(self, *, accumulate: bool) -> None:
        """Clear the gradients of the previous step.

        Accumulated gradients need separate memory: a CUDA graph always writes to the same.
        """
        if not accumulate:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch._foreach_zero_(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _reduce(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' losses, not finite if one is not; finish the gradients.

        Gradients that are not averaged yet are added up by the same call.
        """
        if self._ranks.is_single_process:
            return loss
        total = loss.clone()
        tensors = [*(self._gradients() if self._adds_up else ()), total]
        self._device.sum_over_ranks(tensors, collectives.device_group(self._ranks))
        return total

    def _check_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip the gradients; return their norm before, and 1.0 if the step must be skipped."""
        gradients = self._gradients()
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._scale is not None:
            norm = norm / self._scale.scale
        is_skipped = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
        if self._clip:
            torch._foreach_mul_(gradients, clip_factor(norm, self._clip))
        return norm, is_skipped

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without averaging: it happens once a step, with the last micro-batch."""
        if isinstance(self._loss_module, nn.parallel.DistributedDataParallel):
            return self._loss_module.no_sync()
        return contextlib.nullcontext()


def _to_device(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the arguments of the loss on the device, without copying what is there."""
    jitter = None if batch.jitter is None else batch.jitter.to(device, non_blocking=True)
    return (
        batch.images.to(device, non_blocking=True),
        jitter,
        batch.boxes.to(device, non_blocking=True),
        batch.labels.to(device, non_blocking=True),
    )


def _flattened(tensors: list[Tensor]) -> Tensor:
    """Return a flat copy of many small tensors, in one kernel."""
    return torch.cat([t.flatten() for t in tensors]) if tensors else torch.empty(0)


def _split(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    if not tensors:
        return []
    parts = flat.split([t.numel() for t in tensors])
    return [part.view_as(t) for part, t in zip(parts, tensors, strict=True)]


class BadStep(NamedTuple):
    step: int
    image_ids: list[int]


class NonFiniteGuard:
    def __init__(self, policy: str, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.policy, self._ranks = policy, ranks
        self._watched: list[tuple[BadStep, Tensor]] = []
        self._consecutive = 0
        self._rollbacks = 0

    def watch(self, step: int, is_bad: Tensor, image_ids: list[int]) -> None:
        self._watched.append((BadStep(step, image_ids), is_bad))

    def check(self) -> list[BadStep]:
        """Return the steps that were skipped since the last check; waits for the device.

        They have the images of all ranks on the first rank, and of its own on another rank.
        """
        if not self._watched:
            return []
        flags = torch.stack([flag for _, flag in self._watched]).tolist()
        for flag in flags:
            self._consecutive = self._consecutive + 1 if flag else 0
        bad = [step for (step, _), flag in zip(self._watched, flags, strict=True) if flag]
        self._watched.clear()
        if not bad:
            return []
        own = [step.image_ids for step in bad]
        shares = collectives.gather_to_first(own, self._ranks) or [own]
        return [
            BadStep(step.step, [i for share in shares for i in share[number]])
            for number, step in enumerate(bad)
        ]

    def should_roll_back(self, bad: Sequence[BadStep], where: str) -> bool:
        """Return whether to roll back because of bad steps.

        Raises:
            NonFiniteError: The policy is `stop`, or there were too many bad steps or rollbacks.
        """
        self._rollbacks += self.policy == "rollback"
        has_diverged = self._consecutive >= MAX_CONSECUTIVE or self._rollbacks > MAX_ROLLBACKS
        if self.policy == "stop" or has_diverged:
            number = f", {self._consecutive} in a row" * (self._consecutive >= MAX_CONSECUTIVE)
            number += f", after {MAX_ROLLBACKS} rollbacks" * (self._rollbacks > MAX_ROLLBACKS)
            raise NonFiniteError(
                f"step {bad[0].step}: the loss or a gradient is NaN or infinite ({len(bad)} such "
                f"steps up to step {bad[-1].step}{number}); their images are in {where}",
                hint="they changed no weight: lower --lr, lengthen --warmup or set "
                "--clip-grad, and resume from the last checkpoint with --resume-changed",
            )
        return self.policy == "rollback"
