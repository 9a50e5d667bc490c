"""What all ranks do together: join, average, agree, gather."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ssdctl.device.base import Device
from ssdctl.errors import DistributedError, UsageError
from ssdctl.train.ranks import Ranks

TIMEOUT = datetime.timedelta(minutes=30)  # a rank may prepare the dataset while the others wait
T = TypeVar("T")


@contextlib.contextmanager
def group(ranks: Ranks, device: Device) -> Iterator[None]:
    """Join the other ranks for the length of the block.

    Raises:
        DistributedError: A rank died, hung or could not be reached.
    """
    if ranks.is_alone:
        yield
        return
    try:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if "MASTER_PORT" not in os.environ:
            raise UsageError("MASTER_PORT is not set", hint="start the ranks with ssdctl launch")
        device.register_backend()
        dist.init_process_group(
            device.backend, rank=ranks.rank, world_size=ranks.world_size, timeout=TIMEOUT
        )
        yield
    except (dist.DistError, RuntimeError) as error:
        if not _is_from_a_peer(error):
            raise
        raise DistributedError(
            f"rank {ranks.rank} lost another rank: {str(error).splitlines()[0]}",
            hint="the first failure is in the log of the rank that died",
        ) from error
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the peers may be gone
                dist.destroy_process_group()


def _is_from_a_peer(error: Exception) -> bool:
    words = ("connection closed", "connection reset", "timed out", "gloo", "nccl", "hccl", "peer")
    return isinstance(error, dist.DistError) or any(w in str(error).lower() for w in words)


def wrap(model: nn.Module, ranks: Ranks, device: Device) -> nn.Module:
    """The network with its gradients averaged over the ranks."""
    if ranks.is_alone:
        return model
    ids = [device.torch_device] if device.torch_device.index is not None else None
    ddp = nn.parallel.DistributedDataParallel
    # Batch norm's statistics are averaged before they are used, not copied at every step. The
    # argument was renamed after torch 2.9.
    renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
    no_copies: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return ddp(model, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=100, **no_copies)


def agree(flag: bool, ranks: Ranks, device: Device) -> bool:
    """Whether any rank raised the flag; every rank gets the same answer."""
    if ranks.is_alone:
        return flag
    raised = torch.tensor([int(flag)])  # on the host: the device need not be waited for
    dist.all_reduce(raised, dist.ReduceOp.MAX)
    return bool(raised.item())


def average(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The mean of a tensor over the ranks."""
    if ranks.is_alone:
        return tensor
    total = tensor.clone()
    dist.all_reduce(total)
    return total / ranks.world_size


def average_batch_norms(model: nn.Module, ranks: Ranks) -> None:
    """Average the running statistics, which each rank gathers from its own images."""
    if ranks.is_alone:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer /= ranks.world_size


def barrier(ranks: Ranks) -> None:
    """Wait for every rank."""
    if not ranks.is_alone:
        dist.barrier()


def gather(value: T, ranks: Ranks) -> list[T]:
    """Every rank's value, in the order of the ranks, on the first rank; nothing on the others."""
    if ranks.is_alone:
        return [value]
    values: list[Any] = [None] * ranks.world_size
    dist.gather_object(value, values if ranks.is_first else None)
    return values if ranks.is_first else []


def broadcast(value: T, ranks: Ranks) -> T:
    """The first rank's value, on every rank."""
    if ranks.is_alone:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
