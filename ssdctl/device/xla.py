"""TPUs and other PJRT devices, through torch_xla (extra `tpu-xla`).

Lazy: operations are collected, then compiled and run at each `mark_step`.

One of several processes drives one core (TPU v4 and later: one process per chip); gradients are
added up over the replicas. A single process may drive several cores (all of a host with TPU v2 or
v3): then one program trains on all of them (SPMD). Each batch is split over the cores, and the
compiler inserts the reductions; the result equals one core's with the complete batch.

Tested on the CPU (`PJRT_DEVICE=CPU`, also with `CPU_NUM_DEVICES=2`); not on a TPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.device import Device, refused_device, require_package
from ssdctl.errors import UsageError
from ssdctl.runtime.system import Overridden, private_cache_dir, with_defaults

PACKAGE = "torch_xla"


class Xla(Device):
    name = "xla"
    backend = "cpu:gloo,xla:xla"  # ranks exchange everything but gradients over gloo
    auto_precision = "bf16"
    execution = "lazy"
    ddp_bucket_mb = None  # one reduction in the step's own graph, not per bucket
    memory_errors = ("resource_exhausted",)

    def __init__(self, local_rank: int) -> None:
        for variable in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
            if os.environ.get(variable, "").strip("0") not in ("", "false"):
                raise UsageError(
                    f"{variable} makes everything bf16, also what is to be fp32",
                    hint=f"unset {variable}; the precision bf16 keeps sums in fp32",
                )
        self._xla = importlib.import_module(PACKAGE)
        self._model = importlib.import_module(f"{PACKAGE}.core.xla_model")
        self._metrics = importlib.import_module(f"{PACKAGE}.debug.metrics")
        runtime = importlib.import_module(f"{PACKAGE}.runtime")
        # PJRT's CPU client can write compiled graphs, but not read them.
        if "XLA_PERSISTENT_CACHE_PATH" not in os.environ and runtime.device_type() != "CPU":
            cache = private_cache_dir(f"xla-{local_rank}")
            if cache is not None:
                runtime.initialize_cache(str(cache))
        _claim_chips(local_rank, runtime)
        self.num_cores = int(runtime.addressable_runtime_device_count())
        self._split_batch: Any = None
        if self.num_cores > 1:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise UsageError(
                    f"device xla: each of several processes drives {self.num_cores} cores, which "
                    "is not supported: only a single process can",
                    hint="on TPU v2 and v3 run ssdctl launch on the TPU host itself, which starts "
                    "one process for all its chips; slices of several such hosts are not supported",
                )
            runtime.use_spmd()
            self._split_batch = _batch_splitter(self.num_cores)
        self.torch_device = self._xla.device()
        # Otherwise a learning rate of 0 or 1 becomes part of the graph, which is compiled again.
        with with_defaults({"XLA_NO_SPECIAL_SCALARS": "1"}):
            torch.zeros((), device=self.torch_device).add_(0.5)  # the first scalar reads it
        cores = f", {self.num_cores} cores" if self.num_cores > 1 else ""
        self.label = f"XLA {runtime.device_type()}{cores}"

    @property
    def forms(self) -> tuple[str, ...]:
        return ("no_scatter", "no_gather")

    def settings(self, *, tf32: bool) -> contextlib.AbstractContextManager[None]:
        # A TPU's own default rounds the factors of fp32 products to bf16.
        return _PRODUCTS.by("high" if tf32 else "highest")

    def copy(self, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        if self._split_batch is None or len(tensor) % self.num_cores:
            return tensor.to(self.torch_device)
        sharding = self._split_batch(tensor.dim())
        copies: list[Tensor] = self._model.send_cpu_data_to_device(
            [tensor], self.torch_device, sharding
        )
        return copies[0]

    def register_backend(self) -> None:
        importlib.import_module(f"{PACKAGE}.distributed.xla_backend")

    def sum_over_ranks(self, tensors: list[Tensor], group: Any = None) -> None:
        self._model.all_reduce(self._model.REDUCE_SUM, tensors, pin_layout=False)

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

    def counters(self) -> dict[str, int]:
        """Return the numbers of compiled graphs (`compiles`) and of fetches (`pulls`)."""

        def count(metric: str) -> int:
            data = self._metrics.metric_data(metric)
            return int(data[0]) if data else 0

        return {"compiles": count("CompileTime"), "pulls": count("TransferFromDeviceTime")}


_PRODUCTS: Overridden[str] = Overridden(  # by the public functions torch_xla warns each time
    lambda: sys.modules["_XLAC"]._xla_get_mat_mul_precision(),
    lambda precision: sys.modules["_XLAC"]._xla_set_mat_mul_precision(precision),
)


def _claim_chips(local_rank: int, runtime: Any) -> None:
    """Select the chips of this process before the first use of the device, if torchrun started it.

    Otherwise the first process takes all chips. torch_xla's own rendezvous (`xla://`) does the
    same. `ssdctl launch` names several chips if one process is to drive them.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if local_ranks > 1:
        pjrt = importlib.import_module(f"{PACKAGE}._internal.pjrt")
        pjrt.initialize_multiprocess(local_rank, local_ranks)
    elif runtime.device_type() == "TPU":
        importlib.import_module(f"{PACKAGE}._internal.tpu").configure_one_chip_topology()


def _batch_splitter(num_cores: int) -> Callable[[int], Any]:
    """Return a function from a tensor's number of dimensions to its sharding over the cores."""
    spmd = importlib.import_module(f"{PACKAGE}.distributed.spmd")
    mesh = spmd.Mesh(list(range(num_cores)), (num_cores,), ("batch",))
    return lambda dims: spmd.ShardingSpec(mesh, ("batch", *[None] * (dims - 1)))


def open_device(local_rank: int, execution: str | None) -> Xla:
    hint = "pip install 'torch_xla[tpu]==2.9.*' 'torch==2.9.*': its newest release fits only "
    require_package("xla", PACKAGE, hint + "that torch, and libtpu is in its extra tpu")
    DEVICE_TYPES["xla"].choose_execution(execution)
    with refused_device("xla", "PJRT_DEVICE names the hardware (TPU, or CPU to try it out)"):
        return Xla(local_rank)
