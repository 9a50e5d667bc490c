"""TPU v4 and newer through TorchTPU (package torch_tpu, extra `tpu`).

One process drives one device. `import torch` loads the package, which registers the device "tpu",
the backend "tpu_dist" and torch.compile's backend "tpu" if the PCI bus has a TPU.
Not run on hardware yet: tested with a recording fake.
"""

from __future__ import annotations

import contextlib
import importlib

import torch
from torch import Tensor, nn

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.device import Device, refused_device, require_package
from ssdctl.device.inductor import split_at_buckets
from ssdctl.errors import UsageError
from ssdctl.runtime.hardware import find_hardware
from ssdctl.runtime.packages import torch_warnings_ignored
from ssdctl.runtime.system import Overridden

PACKAGE = "torch_tpu"
TORCH_DEVICE = "tpu"  # the tests' fake computes on the CPU
_PRECISION = Overridden(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)


class Tpu(Device):
    name = "tpu"
    backend = "cpu:gloo,tpu:tpu_dist"  # ranks exchange everything but gradients over gloo
    auto_precision = "bf16"
    ddp_bucket_mb = 25  # PyTorch's default
    memory_errors = ("resource_exhausted", "out of memory")

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.torch_device = torch.device(TORCH_DEVICE)
        with torch_warnings_ignored():  # experimental, says the package
            properties = importlib.import_module("torch.tpu").get_device_properties()
        self.label, self._memory = str(properties.name), int(properties.total_memory)

    @property
    def forms(self) -> tuple[str, ...]:
        return ("no_scatter", "no_gather")

    def settings(self, *, tf32: bool) -> contextlib.AbstractContextManager[None]:
        # A TPU's own default rounds the factors of fp32 products to bf16.
        return _PRECISION.by("high" if tf32 else "highest")

    def compile(self, module: nn.Module, *, overlap: bool = False) -> None:
        if self.execution == "compile":
            self.blocks.enter_context(split_at_buckets(overlap))
            module.compile(backend="tpu", dynamic=False)

    def copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def peak_memory_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated()

    def memory_bytes(self) -> int | None:
        return self._memory

    def release_memory(self) -> None:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def open_device(local_rank: int, execution: str | None) -> Tpu:
    versions = "Python 3.11 or newer, torch 2.11 to 2.15"
    hint = f"pip install {PACKAGE} ({versions}); TPU v2 and v3 need --device xla"
    require_package("tpu", PACKAGE, hint)
    # Without a TPU its runtime would ask Google's cloud for minutes.
    if not any(chip.counts for chip in find_hardware().tpus):
        raise UsageError(
            "device tpu: no TPU v4 or newer found on this machine",
            hint="ssdctl doctor lists the chips on the PCI bus; TPU v2 and v3 need --device xla",
        )
    execution = DEVICE_TYPES["tpu"].choose_execution(execution)
    importlib.import_module(PACKAGE)  # if TORCH_DEVICE_BACKEND_AUTOLOAD is 0
    with refused_device("tpu", "one process at a time can hold a chip"):
        return Tpu(execution)
