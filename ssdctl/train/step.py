"""One optimizer step: colour, network, targets, loss, backward, guard, update.

Nothing here waits for the device: what went wrong is counted there, and read at a log point.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ssdctl.config import TrainConfig
from ssdctl.device.base import Device
from ssdctl.input.loader import Batch
from ssdctl.model.augment import normalise
from ssdctl.model.loss import Losses, MultiboxLoss
from ssdctl.train import distributed
from ssdctl.train.optimizer import set_lr
from ssdctl.train.ranks import Ranks


class StepResult:
    """What a step left on the device: scalars that have not been waited for."""

    def __init__(self, losses: Losses, grad_norm: Tensor, is_bad: Tensor) -> None:
        self.losses = losses
        self.grad_norm = grad_norm
        self.is_bad = is_bad  # 1.0 where the step was left out

    def read(self, ranks: Ranks) -> dict[str, float]:
        """The figures, waited for once; the losses are means over the ranks."""
        losses = distributed.average(torch.stack(list(self.losses)), ranks)
        values = torch.cat([losses, torch.stack([self.grad_norm, self.is_bad])]).tolist()
        names = ("loss", "loss_box", "loss_class", "grad_norm", "is_bad")
        return dict(zip(names, values, strict=True))


class TrainStep:
    """The network, its loss and its optimizer, ready to step.

    Args:
        model: The network on the device, wrapped for the ranks.
        optimizer: Fused, so that it can be told on the device to leave a step out.
        device: Where all of it is.
        config: The run.
        precision: bf16 or fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: Device,
        config: TrainConfig,
        precision: str,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._precision = precision
        self._clip = config.clip_grad
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._dtype = self._parameters[0].dtype
        self._loss = MultiboxLoss(self._dtype).to(device.torch_device)
        self._statistics = [b for b in model.buffers() if b.is_floating_point()]

    def __call__(self, batches: Sequence[Batch], lr: float) -> StepResult:
        """Take one optimizer step on the mean of the micro-batches.

        A step whose loss or gradient is not finite on any rank moves nothing: neither weights nor
        momentum nor the statistics of batch norm. All ranks decide alike.
        """
        set_lr(self._optimizer, lr)
        self._optimizer.zero_grad(set_to_none=True)
        statistics = [b.clone() for b in self._statistics]
        parts = []
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else self._without_sync():
                losses = self._forward(batch)
                (losses.total / len(batches)).backward()
            parts.append(torch.stack([loss.detach() for loss in losses]))
            self._device.mark_step()
        losses = Losses(*torch.stack(parts).mean(dim=0))

        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self._parameters if p.grad is not None]
        )
        is_bad = (~(torch.isfinite(norm) & torch.isfinite(losses.total))).float()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(is_bad, torch.distributed.ReduceOp.MAX)
        if self._clip:
            # nan_to_num: a bad norm must not spread; the optimizer leaves that step out anyway.
            scale = (self._clip / (norm + 1e-6)).clamp(max=1.0).nan_to_num()
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], scale)
        # The fused kernels read this flag on the device (as GradScaler has them do); torch's stubs
        # do not know the attribute.
        self._optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        self._optimizer.step()
        for buffer, before in zip(self._statistics, statistics, strict=True):
            buffer.copy_(torch.where(is_bad > 0, before, buffer))
        self._device.mark_step()
        return StepResult(losses, norm, is_bad)

    def _forward(self, batch: Batch) -> Losses:
        place = self._device.torch_device
        images = batch.images.to(place, non_blocking=True)
        jitter = None if batch.jitter is None else batch.jitter.to(place, non_blocking=True)
        pixels = normalise(images, jitter, dtype=self._dtype)
        with self._device.autocast(self._precision):
            offsets, logits = self._model(pixels)
        boxes = batch.boxes.to(place, self._dtype, non_blocking=True)
        labels = batch.labels.to(place, non_blocking=True)
        result: Losses = self._loss(offsets, logits, boxes, labels)
        return result

    def _without_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients are averaged over the ranks once a step, with the last micro-batch."""
        if isinstance(self._model, nn.parallel.DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()
