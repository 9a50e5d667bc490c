"""torch.compile on the CPU and on GPUs, and what it needs on the machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from torch import nn

from ssdctl.device.base import compile_cache

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


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module's calls as one graph, of static shapes unless the options say otherwise;
    graph breaks are errors."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache("inductor")))
    module.compile(**{"fullgraph": True, "dynamic": False, **options})
