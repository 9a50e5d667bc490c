"""Query the installed packages: their versions, what differs between the supported versions of
PyTorch (2.6 to the newest), and what keeps a package from loading."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from ssdctl.errors import UsageError

OLDEST_TORCH = (2, 6)  # the last release for first-generation Gaudi cards
NEWEST_CUDA = 13
LOADER_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD")
AUTOCAST_DEVICES = ("cpu", "cuda", "hpu", "xla")
NATIVE_PACKAGES = ("numpy", "torch", "pyarrow", "PIL", "torchvision", "matplotlib", "hotcoco")


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_release(name: str) -> tuple[int, int] | None:
    """Return the major and minor version of an installed package; None if it is absent.

    Alphas of vendor builds (`2.6.0a0+git...`) count as the release that they lead to.
    """
    match = re.match(r"(\d+)\.(\d+)", package_version(name) or "")
    return (int(match[1]), int(match[2])) if match else None


def torch_release() -> tuple[int, int]:
    """Return the installed PyTorch's major and minor version; if absent, the oldest supported."""
    return package_release("torch") or OLDEST_TORCH


def dali_extra() -> str:
    """Return the extra of ssdctl whose nvidia-dali fits the installed PyTorch's CUDA."""
    return f"dali-cuda{min(max(_cuda_major(), 12), NEWEST_CUDA)}"


def dali_package() -> str:
    """Return the nvidia-dali package of `dali_extra`."""
    return f"nvidia-{dali_extra()}0"


def _cuda_major() -> int:
    """Return the major version of the CUDA that the installed PyTorch was built with.

    Read from the package's version (`2.6.0+cu124`), else from the CUDA packages that it requires.
    """
    requirements = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        requirements = metadata.requires("torch") or []
    if match := re.search(r"\+cu(\d\d)", package_version("torch") or ""):
        return int(match[1])
    return 12 if any(re.match(r"nvidia-.*-cu12\b", text) for text in requirements) else NEWEST_CUDA


def no_buffer_sync(ddp: type) -> dict[str, bool]:
    """Return the DistributedDataParallel option that stops it from copying buffers each step.

    The argument `broadcast_buffers` was renamed after torch 2.9.
    """
    is_renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters
    return {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}


@contextlib.contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Ignore the warnings of torch and of its exporter, in all threads.

    `warnings.catch_warnings` of two threads may restore each other's filters, and undoes what other
    threads changed meanwhile. This only adds one filter, and removes it.
    """
    ours = ("ignore", None, Warning, re.compile(r"(ssdctl|torch|torch_tpu|onnx\w*|importlib)\b"), 0)
    before: Any = warnings.filters
    before.insert(0, ours)
    try:
        yield
    finally:
        now: Any = warnings.filters  # another list inside or after somebody's catch_warnings
        for filters in (before,) if now is before else (before, now):
            with contextlib.suppress(ValueError):  # reset meanwhile
                filters.remove(ours)


@contextlib.contextmanager
def torch_as_imported() -> Iterator[None]:
    """Let torch compute as in a fresh process, whatever its modes are in this thread.

    Those are the default device, gradients, inference mode and autocast. All threads share the
    default type, so another one is refused.

    Raises:
        UsageError: The default type is not float32.
    """
    with contextlib.ExitStack() as stack:
        if "torch" in sys.modules:
            torch: Any = importlib.import_module("torch")  # waits for another thread's import
            if (dtype := torch.get_default_dtype()) != torch.float32:
                hint = "call torch.set_default_dtype(torch.float32) before"
                raise UsageError(f"torch's default type is {dtype}: expected float32", hint=hint)
            if torch.empty(0).device.type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if not torch.is_grad_enabled():
                stack.enter_context(torch.enable_grad())
            for name in filter(torch.is_autocast_enabled, AUTOCAST_DEVICES):
                stack.enter_context(torch.autocast(name, enabled=False))
        yield


def library_error(error: BaseException | None) -> UsageError | None:
    """Return the error for a package that a shared library keeps from loading, else None."""
    package = ""
    while error is not None:
        package = _importing_package(error) or package
        is_of_import = isinstance(error, (ImportError, OSError))
        if is_of_import and (match := re.search(r"(\S+\.so\S*): ([^\n]+)", str(error))):
            break
        error = error.__cause__ or error.__context__
    else:
        return None
    variables = [name for name in LOADER_VARIABLES if os.environ.get(name)]
    hint = f"reinstall {package or 'the package'}"
    if variables:
        values = " and ".join(f"{name}={os.environ[name]}" for name in variables)
        hint = f"{values} makes the system load other libraries: unset it, or {hint}"
    return UsageError(
        f"{package or 'a package'} cannot be loaded: {match[1]}: {match[2]}", hint=hint
    )


def _importing_package(error: BaseException) -> str:
    modules = [f.f_globals.get("__name__", "") for f, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(module).partition(".")[0] for module in modules]
    return next((name for name in names if name in NATIVE_PACKAGES), "")
