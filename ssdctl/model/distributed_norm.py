"""Batch norm over the images of all ranks, on any device, in eager, lazy and compiled steps.

PyTorch's SyncBatchNorm needs CUDA and cannot be compiled. Here one all-reduce of two values per
channel in forward and one in backward exchange the statistics and their gradients. It is a custom
operator, which a compiler treats as opaque. Shapes are static: every rank has the same number of
images.
Shapes: B batch, C channels, H and W of the map.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

# Keep the all-reduce out of CUDA graphs where PyTorch supports it.
_TAGS = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()

# Not `torch.library.custom_op`: its first call imports the compiler, 8 seconds of CPU time.
_LIBRARY = torch.library.Library("ssdctl", "FRAGMENT")
_LIBRARY.define("mean_over_ranks(Tensor values, str group) -> Tensor", tags=_TAGS)
_LIBRARY.define("copy_of_buffer(Tensor values) -> Tensor")


@torch.library.impl(_LIBRARY, "mean_over_ranks", "CompositeExplicitAutograd")
def _mean_over_ranks(values: Tensor, group: str) -> Tensor:
    total, found = values.clone(), _group_of(group)
    dist.all_reduce(total, group=found)
    return total / dist.get_world_size(found)


def _group_of(name: str) -> Any:
    groups: Any = dist.distributed_c10d
    return groups._resolve_process_group(name) if name else None


@torch.library.impl(_LIBRARY, "copy_of_buffer", "CompositeExplicitAutograd")
def _copy_of_buffer(values: Tensor) -> Tensor:
    return values.clone()


for _name in ("mean_over_ranks", "copy_of_buffer"):
    torch.library.register_fake(
        f"ssdctl::{_name}", lambda values, *_: torch.empty_like(values), lib=_LIBRARY
    )


def mean_over_ranks(values: Tensor, group: str) -> Tensor:
    """Return the mean of a tensor over the ranks of the process group with a name.

    In the group of the call a rank that leaves ends the wait of the others. The default group,
    whose name is empty here, may be the caller's, which stays open.
    """
    result: Tensor = torch.ops.ssdctl.mean_over_ranks(values, group)
    return result


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    # The objective is the mean of the ranks' losses, as the gradients of weights are averaged too.
    return mean_over_ranks(gradient.contiguous(), ctx.group), None


torch.library.register_autograd(
    "ssdctl::mean_over_ranks", _backward, setup_context=_keep_group, lib=_LIBRARY
)


class DistributedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` that trains with the statistics of all ranks' batches."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float

    def __init__(
        self, features: int, *, eps: float, momentum: float, world_size: int, group: str
    ) -> None:
        super().__init__(features, eps, momentum)
        self.world_size, self.group = world_size, group

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (B, C, H, W); the statistics are computed in the precision of the weights."""
        if not self.training:
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            local_var_C, local_mean_C = torch.var_mean(
                input.to(self.weight.dtype), dim=(0, 2, 3), correction=0
            )
            # Relative to the running mean, which is equal on all ranks: squares of small numbers.
            # A compiler would save or recompute an ordinary copy for the backward pass from the
            # buffer, which has changed by then.
            reference_C = torch.ops.ssdctl.copy_of_buffer(self.running_mean)
            local_shift_C = local_mean_C - reference_C
            local_square_C = local_var_C + local_shift_C.square()
            shift_C, square_C = mean_over_ranks(
                torch.stack([local_shift_C, local_square_C]), self.group
            )
            mean_C = reference_C + shift_C
            var_C = (square_C - shift_C.square()).clamp(min=0)
            self._track(mean_C.detach(), var_C.detach(), input.numel() // input.shape[1])
            scale_C = self.weight * torch.rsqrt(var_C + self.eps)
            offset_C = self.bias - mean_C * scale_C
            return (input * scale_C[:, None, None] + offset_C[:, None, None]).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean_C: Tensor, var_C: Tensor, values: int) -> None:
        total = values * self.world_size
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean_C, self.momentum)
        self.running_var.lerp_(var_C * (total / max(total - 1, 1)), self.momentum)


def convert_batch_norms(module: nn.Module, world_size: int, group: str = "") -> None:
    """Replace every `nn.BatchNorm2d` of a network, in place, keeping its parameters and buffers.

    Args:
        group: The name of the ranks' process group; empty for the default one.
    """
    for name, child in module.named_children():
        if type(child) is not nn.BatchNorm2d:
            convert_batch_norms(child, world_size, group)
            continue
        assert child.momentum is not None
        norm = DistributedBatchNorm2d(
            child.num_features,
            eps=child.eps,
            momentum=child.momentum,
            world_size=world_size,
            group=group,
        )
        norm.weight, norm.bias = child.weight, child.bias
        norm._buffers = child._buffers
        setattr(module, name, norm.train(child.training))
