"""What differs between the supported versions of PyTorch, 2.6 to the newest; does not import it."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib import metadata

from ssdctl.runtime.packages import package_release

OLDEST = (2, 6)  # the last that first-generation Gaudi cards have
NEWEST_CUDA = 13
NUMA_BINDING = (2, 9)  # torchrun has --numa-binding from here on


def installed_version() -> tuple[int, int]:
    """Return the installed PyTorch's major and minor version; if absent, the oldest supported."""
    return package_release("torch") or OLDEST


def cuda_major() -> int:
    """Return the major version of the CUDA that the installed PyTorch was built with: 12 or 13.

    Read from the package's version (`2.6.0+cu124`), else from the CUDA packages that it requires.
    """
    try:
        version, requirements = metadata.version("torch"), metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return NEWEST_CUDA
    if match := re.search(r"\+cu(\d\d)", version):
        return int(match[1])
    return 12 if any(re.match(r"nvidia-.*-cu12\b", text) for text in requirements) else NEWEST_CUDA


def dali_extra() -> str:
    """Return the extra of ssdctl whose nvidia-dali fits the installed PyTorch's CUDA."""
    return f"dali-cuda{min(max(cuda_major(), 12), NEWEST_CUDA)}"


def dali_package() -> str:
    """Return the name of the nvidia-dali package of that extra."""
    return f"nvidia-{dali_extra()}0"


def no_buffer_sync(ddp: type) -> dict[str, bool]:
    """Return the DistributedDataParallel option that stops it from copying buffers each step.

    The argument `broadcast_buffers` was renamed after torch 2.9.
    """
    is_renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
    return {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}


@contextlib.contextmanager
def without_tf32_warnings() -> Iterator[None]:
    """Suppress the warnings that some versions issue about the older names of the TF32 switches.

    Their compiler still reads those names, so they are the ones to set.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
