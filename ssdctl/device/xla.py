"""TPUs and other PJRT devices, through torch_xla (extra `tpu`).

Lazy: operations are collected, then compiled and run at each `mark_step`. Tested on the CPU
(`PJRT_DEVICE=CPU`); not on a TPU yet, and not with several replicas.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.device.base import (
    Decoder,
    Module,
    ParameterGroups,
    capturable_adamw,
    choose_execution,
    compile_cache,
)
from ssdctl.errors import UsageError
from ssdctl.files import make_dir

PACKAGE = "torch_xla"


class Xla:
    """Implement `ssdctl.device.base.Device` for XLA devices."""

    name = "xla"
    backend = "cpu:gloo,xla:xla"  # ranks exchange everything but gradients over gloo
    has_native_bf16 = True
    precisions = DEVICE_TYPES["xla"].precisions
    auto_precision = "bf16"
    execution = "lazy"
    notices: tuple[str, ...] = ()
    is_host = False
    ddp_bucket_mb: int | None = None  # one reduction in the step's own graph, not per bucket
    supports_found_inf = False
    has_sync_bn = DEVICE_TYPES["xla"].has_sync_bn
    decoder: Decoder | None = None

    def __init__(self, local_rank: int) -> None:
        # Otherwise a learning rate of 0 or 1 becomes part of the graph, which is compiled again.
        os.environ.setdefault("XLA_NO_SPECIAL_SCALARS", "1")
        self._xla = importlib.import_module(PACKAGE)
        self._model = importlib.import_module(f"{PACKAGE}.core.xla_model")
        self._metrics = importlib.import_module(f"{PACKAGE}.debug.metrics")
        runtime = importlib.import_module(f"{PACKAGE}.runtime")
        # PJRT's CPU client can write compiled graphs, but not read them.
        if "XLA_PERSISTENT_CACHE_PATH" not in os.environ and runtime.device_type() != "CPU":
            runtime.initialize_cache(str(make_dir(compile_cache("xla", local_rank))))
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _claim_chip(local_rank)
            _require_one_device(runtime)
        logging.getLogger(f"{PACKAGE}.backends").setLevel(
            logging.ERROR
        )  # it warns at each change of precision
        self._products = ""
        self.set_tf32(False)
        self.torch_device = self._xla.device()
        self.label = f"XLA {self._model.xla_device_hw(self.torch_device)}"

    def place(self, model: Module) -> Module:
        return model.to(self.torch_device)  # the compiler chooses the layout

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("xla", torch.bfloat16, enabled=precision == "bf16")

    def set_tf32(self, wanted: bool) -> None:
        # A TPU's own default rounds the factors of fp32 products to bf16.
        products = "high" if wanted else "highest"
        if products != self._products:
            backends = importlib.import_module(f"{PACKAGE}.backends")
            backends.set_mat_mul_precision(products)
            self._products = products

    def compile(self, module: nn.Module) -> None:
        pass

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.clone().to(self.torch_device)

    def wait_for_copies(self) -> None:
        pass

    def sgd(self, groups: ParameterGroups, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, foreach=False)

    def adamw(
        self, groups: ParameterGroups, lr: float, betas: tuple[float, float]
    ) -> torch.optim.Optimizer:
        return capturable_adamw(groups, lr, betas, self.torch_device)

    def register_backend(self) -> None:
        importlib.import_module(f"{PACKAGE}.distributed.xla_backend")

    def mark_step(self) -> None:
        self._xla.sync()

    def synchronize(self) -> None:
        self._xla.sync(wait=True)
        self._model.wait_device_ops()

    def peak_memory_bytes(self) -> int:
        return int(self._memory().get("peak_bytes_used", 0))

    def memory_bytes(self) -> int | None:
        limit = int(self._memory().get("bytes_limit", 0))
        return limit or None

    def _memory(self) -> dict[str, int]:
        try:
            return self._model.get_memory_info(self.torch_device)
        except RuntimeError:  # PJRT's CPU client has no memory statistics
            return {}

    def release_memory(self) -> None:
        pass

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

    def counters(self) -> dict[str, int]:
        def count(metric: str) -> int:
            data = self._metrics.metric_data(metric)
            return int(data[0]) if data else 0

        return {"compiles": count("CompileTime"), "pulls": count("TransferFromDeviceTime")}


def _claim_chip(local_rank: int) -> None:
    """Assign one chip of the node to this process; else the first process takes all chips.

    torch_xla's own rendezvous (`xla://`) does the same before it uses the device.
    """
    pjrt = importlib.import_module(f"{PACKAGE}._internal.pjrt")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local_ranks > 1:
        pjrt.initialize_multiprocess(local_rank, local_ranks)
    else:
        pjrt.initialize_singleprocess()


def _require_one_device(runtime: Any) -> None:
    """Check that this process drives one device, since a rank trains on one.

    The process of a TPU v2 or v3 chip owns two cores; the first all-reduce of several ranks would
    wait for the replicas of the second cores, which do not run.

    Raises:
        UsageError: It drives several.
    """
    if (count := runtime.addressable_device_count()) > 1:
        raise UsageError(
            f"device xla: each process drives {count} cores here, as on TPU v2 and v3; training on "
            "several such chips is not supported",
            hint="--tpus 1 trains on one core of one chip; TPU v4 and later have one core a chip",
        )


def open_xla(local_rank: int, execution: str | None) -> Xla:
    """Open this process's XLA device.

    Raises:
        UsageError: torch_xla is absent, or PJRT finds no device.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError(
            f"device xla: the package {PACKAGE} is not installed here",
            hint="pip install 'ssdctl[tpu]', with the torch of the same version",
        )
    choose_execution("xla", execution, ("lazy",))
    try:
        return Xla(local_rank)
    except (RuntimeError, ImportError) as error:
        raise UsageError(
            f"device xla: {str(error).splitlines()[0]}",
            hint="PJRT_DEVICE names the hardware (TPU, or CPU to try it out)",
        ) from error
