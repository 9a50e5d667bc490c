"""torch.compile on the CPU and on GPUs, and its requirements."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ssdctl.runtime.packages import torch_release
from ssdctl.runtime.system import Overridden, private_cache_dir, with_variables

OLDEST_COMBO_KERNELS = (2, 9)  # PyTorch release; earlier ones have an experiment
OLDEST_GPU = (7, 0)  # compute capability; Triton's minimum
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def resolve_execution(
    execution: str, gpu: tuple[int, int] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the execution that this machine supports, and the reason if another was requested.

    Args:
        gpu: Compute capability of the GPU that runs the steps; None for the CPU.
    """
    reason = _missing_requirement(gpu) if execution == "compile" else None
    if reason is None:
        return execution, ()
    return "eager", (f"steps run eagerly, not compiled: {reason}",)


def _missing_requirement(gpu: tuple[int, int] | None) -> str | None:
    if gpu is not None and gpu < OLDEST_GPU:
        return f"Triton needs compute capability {OLDEST_GPU[0]}, the GPU has {gpu[0]}.{gpu[1]}"
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if not any(shutil.which(name) for name in compilers if name):
        return "there is no C++ compiler (g++) on the PATH"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "Python's headers are absent (package python3-dev)"
    if gpu is not None and importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def gpu_options(module: nn.Module | None = None) -> dict[str, Any]:
    """Return the inductor options for training on a GPU that this PyTorch supports.

    benchmarks/RESULTS.md lists the effect of each.

    Args:
        module: The step's. Batch norm over several ranks cannot be part of a CUDA graph; before
            PyTorch could leave an operator out (`cudagraph_unsafe`), there is none at all.
    """
    import torch._inductor

    options: dict[str, Any] = {
        "triton.cudagraphs": hasattr(torch.Tag, "cudagraph_unsafe")
        or module is None
        or all(getattr(part, "world_size", 1) == 1 for part in module.modules()),
        # Otherwise the heads, with few channels, prevent channels-last in the entire network.
        "force_layout_optimization": True,
        # ReLU's mask is recomputed from six values where it is used, instead of being written.
        "realize_reads_threshold": 6,
    }
    if torch_release() >= OLDEST_COMBO_KERNELS:
        options["combo_kernels"] = True  # independent small kernels in one launch
    return {k: v for k, v in options.items() if k in torch._inductor.list_options()}


def keep_pool_backward() -> None:
    """Let inductor generate max-pool's backward as a gather.

    Its own decomposition, new in torch 2.15, adds with atomics into an fp32 copy.
    """
    from torch._inductor.decomposition import decompositions

    decompositions.pop(torch.ops.aten.max_pool2d_with_indices_backward.default, None)


def _set_split(overlap: bool) -> None:
    torch._dynamo.config.optimize_ddp = overlap


_SPLIT: Overridden[Any] = Overridden(lambda: torch._dynamo.config.optimize_ddp, _set_split)


def split_at_buckets(overlap: bool) -> contextlib.AbstractContextManager[None]:
    """Let DistributedDataParallel split compiled steps where its buckets end, or keep one graph.

    Split, the gradients of a bucket are exchanged during the backward pass. But before torch 2.8
    the parts have no static inputs, so CUDA graphs are recorded again and again
    (pytorch/pytorch#155746). Habana's example of compiled training keeps one graph.
    """

    return _SPLIT.by(overlap)


def compile_in_place(
    module: nn.Module, blocks: contextlib.ExitStack, *, overlap: bool = False, **options: Any
) -> None:
    """Compile a module's calls as one graph; graph breaks are errors.

    Shapes are static unless the options override it. For `overlap` see `split_at_buckets`.

    Args:
        blocks: Gets the settings of the process that compiling needs: call the module in them.
    """
    # On a network file system, ranks of several nodes fail at a cold start. The compiler's import
    # sets the variable itself, to the absolute path.
    default = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    folder = os.environ.get(CACHE) or private_cache_dir("inductor") or default
    blocks.enter_context(with_variables({CACHE: str(Path(folder).resolve())}))
    blocks.enter_context(split_at_buckets(overlap))
    module.compile(**{"fullgraph": True, "dynamic": False, **options})
