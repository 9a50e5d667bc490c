"""The kind of device of a tensor, on which the formulation of a step depends."""

from __future__ import annotations

from torch import Tensor


def is_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU. benchmarks/codegen.py replaces this function."""
    return tensor.device.type == "cuda"


def is_xla(tensor: Tensor) -> bool:
    """Return whether a tensor is on an XLA device, where gather and scatter are slow.

    A comparison with every index, and a sum, are fused into the operations around them.
    """
    return tensor.device.type == "xla"
