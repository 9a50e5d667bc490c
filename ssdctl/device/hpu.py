"""Intel Gaudi through habana_frameworks, which is part of the vendor's image.

The import of the bridge registers the device "hpu" with PyTorch and sets the mode: lazy
(`PT_HPU_LAZY_MODE=1`: operations are collected and compiled at each `mark_step`), or eager (0),
with or without torch.compile. Not run on hardware yet: tested with a recording fake.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.device import Device, Module
from ssdctl.device.inductor import split_at_buckets
from ssdctl.errors import UsageError
from ssdctl.runtime.packages import package_release
from ssdctl.runtime.system import private_cache_dir, with_variables

BRIDGE = "habana_frameworks"
BRIDGE_PACKAGE = "habana-torch-plugin"
COMPILE_RELEASE = (1, 22)  # first release with torch.compile as default; lazy is legacy
TORCH_DEVICE = "hpu"  # the tests' fake computes on the CPU
MODE = "PT_HPU_LAZY_MODE"
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
RECIPES_MB = 4096
_modes: dict[ModuleType | None, str] = {}  # of the bridge that ssdctl has imported


class Hpu(Device):
    name = "hpu"
    label = "Intel Gaudi"
    backend = "cpu:gloo,hpu:hccl"  # ranks exchange everything but gradients over gloo
    auto_precision = "bf16"
    ddp_bucket_mb = 100  # Habana's recommendation
    memory_errors = ("out of memory", "allocation failed")

    def __init__(self, execution: str) -> None:
        self.execution = execution
        _require_mode(execution)
        mode = str(int(execution == "lazy"))
        recipes, self.notices = _recipe_cache()
        # The import of the bridge reads both; what else does is not documented.
        self._variables = {MODE: mode, **recipes}
        with with_variables(self._variables):
            self._core = importlib.import_module(f"{BRIDGE}.torch.core")
            self._hpu = importlib.import_module(f"{BRIDGE}.torch.hpu")
        _modes[self._core] = mode
        self.torch_device = torch.device(TORCH_DEVICE)

    @property
    def forms(self) -> tuple[str, ...]:
        return ("compiled", "no_scatter") if self.execution == "compile" else ("no_scatter",)

    def settings(self, *, tf32: bool) -> contextlib.AbstractContextManager[None]:
        return with_variables(self._variables)

    def place(self, model: Module) -> Module:
        with _clear_errors():  # the first tensor acquires the card
            return super().place(model)

    def compile(self, module: nn.Module, *, overlap: bool = False) -> None:
        if self.execution == "compile":
            self.blocks.enter_context(split_at_buckets(overlap))
            module.compile(backend="hpu_backend", dynamic=False)

    def copy(self, tensor: Tensor) -> Tensor:
        # The bridge keeps the pinned copy until it is transferred; other memory it copies itself.
        pinned = tensor.pin_memory(self.torch_device)
        return pinned.to(self.torch_device, non_blocking=True)

    def register_backend(self) -> None:
        hccl = importlib.import_module(f"{BRIDGE}.torch.distributed.hccl")
        with _clear_errors():
            hccl.initialize_distributed_hpu()  # assigns a card to this rank

    def mark_step(self) -> None:
        if self.execution == "lazy":
            self._core.mark_step()

    def synchronize(self) -> None:
        self._hpu.synchronize()

    def peak_memory_bytes(self) -> int:
        return int(self._hpu.max_memory_allocated())

    def memory_bytes(self) -> int | None:
        _, total = self._hpu.mem_get_info()
        return int(total)

    def release_memory(self) -> None:
        self._hpu.reset_peak_memory_stats()


def _recipe_cache() -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variable that keeps compiled graphs for ranks and resumed runs, and warnings.

    The vendor requires a local disk: the ranks lock the files.
    """
    if os.environ.get(RECIPES):
        return {}, ()
    cache = private_cache_dir("hpu")
    if cache is None:
        return {}, (
            "compiled graphs are not kept: $TMPDIR/ssdctl-UID (or /tmp/ssdctl-UID) belongs to "
            f"another user or is open to others; {RECIPES} names another folder",
        )
    return {RECIPES: f"{cache},false,{RECIPES_MB}"}, ()


def _require_mode(execution: str) -> None:
    """Raise UsageError if the bridge was loaded in the other mode, which cannot be changed.

    `import torch` loads it, unless PT_HPU_AUTOLOAD is 0 (ssdctl/__main__.py).
    """
    if f"{BRIDGE}.torch.core" not in sys.modules:
        return
    default = "1" if _default_execution() == "lazy" else "0"
    is_lazy = (_chosen_mode() or default) != "0"
    if is_lazy != (execution == "lazy"):
        loaded, wanted = ("lazy", "0") if is_lazy else ("eager", "1")
        raise UsageError(
            f"device hpu: {BRIDGE} is already loaded in {loaded} mode, which does not fit "
            f"execution {execution}",
            hint=f"start Python with {MODE}={wanted}",
        )


def _chosen_mode() -> str | None:
    """Return the mode in which ssdctl loaded the bridge, else that of the user's variable."""
    return _modes.get(sys.modules.get(f"{BRIDGE}.torch.core")) or os.environ.get(MODE)


def _default_execution() -> str:
    release = package_release(BRIDGE_PACKAGE)
    return "compile" if release is not None and release >= COMPILE_RELEASE else "lazy"


@contextlib.contextmanager
def _clear_errors() -> Iterator[None]:
    """Replace the bridge's error "Device acquire failed" by one with its cause and remedy."""
    try:
        yield
    except RuntimeError as error:
        if "acquire failed" not in str(error):
            raise
        what = "no free Gaudi card: another process holds it"
        hint = "hl-smi lists the processes that hold cards; end the one that is not needed"
        if "No devices found" in str(error):
            what = "no Gaudi card found on this machine"
            hint = "hl-smi lists the cards; a container needs --runtime=habana and "
            hint += "HABANA_VISIBLE_DEVICES"
        raise UsageError(f"device hpu: {what}", hint=hint) from error


def open_device(local_rank: int, execution: str | None) -> Hpu:
    if importlib.util.find_spec(BRIDGE) is None:
        raise UsageError(
            f"device hpu: the Gaudi bridge ({BRIDGE}) is not installed here",
            hint="run inside the vendor's PyTorch image for Gaudi, and install ssdctl there with "
            "pip install --no-deps to keep its torch",
        )
    if execution is None:  # the user may have chosen by the vendor's own variable
        execution = {"0": "compile", "1": "lazy"}.get(_chosen_mode() or "")
    execution = DEVICE_TYPES["hpu"].choose_execution(execution or _default_execution())
    with _clear_errors():
        return Hpu(execution)
