"""torch.compile on the CPU and on GPUs, and what it needs on the machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdctl.device.base import compile_cache
from ssdctl.runtime.torch_compat import installed_version

OLDEST_COMBO_KERNELS = (2, 9)  # PyTorch; before, they were an early experiment
OLDEST_GPU = (7, 0)  # that Triton compiles for


def resolve_execution(
    execution: str, gpu: tuple[int, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """The execution that this machine can give, and why where it is not the wanted one.

    Args:
        execution: The wanted one.
        gpu: Its compute capability, where a GPU is to run the steps.
    """
    if execution != "compile":
        return execution, ()
    reason = _what_is_missing(gpu)
    if reason is None:
        return "compile", ()
    return "eager", (f"steps run eagerly, not compiled: {reason}",)


def _what_is_missing(gpu: tuple[int, int] | None) -> str | None:
    if gpu is not None and gpu < OLDEST_GPU:
        return f"Triton needs compute capability {OLDEST_GPU[0]}, the GPU has {gpu[0]}.{gpu[1]}"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if not any(shutil.which(name) for name in compilers if name):
        return "there is no C++ compiler (g++) on the path"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's headers are absent (package python3-dev)"
    if gpu is not None and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def gpu_options() -> dict[str, Any]:
    """Return inductor's options for a training step on a GPU, as far as this PyTorch has them.

    benchmarks/RESULTS.md says what each changes.
    """
    import torch._inductor

    options: dict[str, Any] = {
        "triton.cudagraphs": True,
        # Heads with few channels would keep the whole network from channels-last.
        "force_layout_optimization": True,
    }
    if installed_version() >= OLDEST_COMBO_KERNELS:
        options["combo_kernels"] = True  # independent small kernels in one launch
    return {k: v for k, v in options.items() if k in torch._inductor.list_options()}


def keep_pool_backward() -> None:
    """Have inductor generate max-pool's backward as a gather.

    Its own decomposition, new in torch 2.15, adds with atomics into an fp32 copy.
    """
    from torch._inductor.decomposition import decompositions

    decompositions.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module's calls as one graph, of static shapes unless the options say otherwise;
    graph breaks are errors."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache("inductor")))
    module.compile(**{"fullgraph": True, "dynamic": False, **options})
