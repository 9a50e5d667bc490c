"""Intel Gaudi through habana_frameworks, which the vendor's image brings.

The import of the bridge registers the device "hpu" with PyTorch and settles the mode: lazy
(`PT_HPU_LAZY_MODE=1`: graphs are gathered and compiled at each `mark_step`), or eager (0), alone or
with torch.compile. Not run on hardware yet: tested with a recording stand-in for the bridge.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.device.base import Decoder, Module, ParameterGroups, choose_execution, compile_cache
from ssdctl.errors import UsageError

BRIDGE = "habana_frameworks"
TORCH_DEVICE = "hpu"  # the stand-in of the tests computes on the CPU
MODE = "PT_HPU_LAZY_MODE"
RECIPES = "PT_HPU_RECIPE_CACHE_CONFIG"
RECIPES_MB = 4096
ADAMW_EPS = 1e-8


class Hpu:
    """See `ssdctl.device.base.Device`."""

    name = "hpu"
    label = "Intel Gaudi"
    backend = "cpu:gloo,hpu:hccl"  # what ranks tell each other beside the gradients needs no card
    has_native_bf16 = True
    precisions: tuple[str, ...] = ("bf16", "fp32")
    notices: tuple[str, ...] = ()
    is_host = False
    averages_in_backward = True
    supports_found_inf = False
    has_sync_bn = False
    decoder: Decoder | None = None

    def __init__(self, execution: str) -> None:
        self.execution = execution
        # Both are read when the bridge is imported. The cache is what resumes need not compile.
        os.environ[MODE] = str(int(execution == "lazy"))
        os.environ.setdefault(RECIPES, f"{compile_cache('hpu')},false,{RECIPES_MB}")
        self._core = importlib.import_module(f"{BRIDGE}.torch.core")
        self._hpu = importlib.import_module(f"{BRIDGE}.torch.hpu")
        self.torch_device = torch.device(TORCH_DEVICE)

    def place(self, model: Module) -> Module:
        with _translated():  # the first tensor takes the card
            return model.to(self.torch_device)

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.torch_device.type, torch.bfloat16, enabled=precision == "bf16")

    def set_tf32(self, wanted: bool) -> None:
        pass

    def compile(self, module: nn.Module) -> None:
        if self.execution == "compile":
            module.compile(backend="hpu_backend", dynamic=False)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone().to(self.torch_device, non_blocking=True)

    def wait_for_copies(self) -> None:
        pass

    def sgd(self, groups: ParameterGroups, lr: float, momentum: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self._vendors().FusedSGD(
            groups, lr=lr, momentum=momentum
        )
        return optimizer

    def adamw(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        # PyTorch's eps; the vendor's own is a hundred times as large.
        optimizer = self._vendors().FusedAdamW(groups, lr=lr, betas=betas, eps=ADAMW_EPS)
        return _with_portable_count(optimizer)

    def _vendors(self) -> Any:
        return importlib.import_module(f"{BRIDGE}.torch.hpex.optimizers")

    def register_backend(self) -> None:
        hccl = importlib.import_module(f"{BRIDGE}.torch.distributed.hccl")
        with _translated():
            hccl.initialize_distributed_hpu()  # gives this rank its card

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

    def is_out_of_memory(self, error: BaseException) -> bool:
        words = str(error).lower()
        return isinstance(error, RuntimeError) and (
            "out of memory" in words or "allocation failed" in words
        )

    def counters(self) -> dict[str, int]:
        return {}


def _with_portable_count(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Save and load the steps done as PyTorch's AdamW does, so that either goes on from the other.

    The vendor's counts per group, in Python; PyTorch's per parameter, in a tensor.
    """

    def put(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        counts = {i: float(g.get("step", 0)) for g in state["param_groups"] for i in g["params"]}
        kept = {i: {**s, "step": torch.tensor(counts[i])} for i, s in state["state"].items()}
        return {**state, "state": kept}

    def take(loaded: torch.optim.Optimizer) -> None:
        for group in loaded.param_groups:
            group["step"] = int(loaded.state[group["params"][0]]["step"])

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_post_hook(take)
    return optimizer


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Say what the bridge means by "Device acquire failed", with or without "No devices found"."""
    try:
        yield
    except RuntimeError as error:
        if "acquire failed" not in str(error):
            raise
        if "No devices found" in str(error):
            raise UsageError(
                "device hpu: this machine shows no Gaudi card",
                hint="hl-smi lists the cards; a container needs --runtime=habana and "
                "HABANA_VISIBLE_DEVICES",
            ) from error
        raise UsageError(
            "device hpu: no free Gaudi card: another process holds it",
            hint="hl-smi lists the processes that hold cards; end the one that is not needed",
        ) from error


def is_there() -> bool:
    """Whether the bridge is installed."""
    return importlib.util.find_spec(BRIDGE) is not None


def open_hpu(local_rank: int, execution: str | None) -> Hpu:
    """This process's Gaudi card.

    Raises:
        UsageError: The bridge is absent, or it finds no card.
    """
    if not is_there():
        raise UsageError(
            f"device hpu: the Gaudi bridge ({BRIDGE}) is not installed here",
            hint="run inside the vendor's PyTorch image for Gaudi, and install ssdctl there with "
            "pip install --no-deps so that its torch stays",
        )
    if execution is None and os.environ.get(MODE) == "0":
        execution = "compile"  # the user chose the newer mode in the vendor's own way
    execution = choose_execution("hpu", execution, ("lazy", "compile", "eager"))
    with _translated():
        return Hpu(execution)
