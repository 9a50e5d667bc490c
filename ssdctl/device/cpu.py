"""The CPU: channels-last convolutions by oneDNN, bf16 where the processor has it."""

from __future__ import annotations

import contextlib
import platform
import resource
from pathlib import Path
from typing import Any

import torch

from ssdctl.device.base import Module, channels_last

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, as /proc/cpuinfo names them


class Cpu:
    """See `ssdctl.device.base.Device`."""

    name = "cpu"
    backend = "gloo"
    precisions: tuple[str, ...] = ("bf16", "fp32")

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        facts = _cpuinfo()
        self.label = facts.get("model name", platform.processor() or "CPU")
        flags = (facts.get("flags") or facts.get("Features") or "").split()
        self.has_native_bf16 = bool(BF16_FLAGS.intersection(flags))

    def place(self, model: Module) -> Module:
        return channels_last(model.to(self.torch_device))

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

    def register_backend(self) -> None:
        pass

    def mark_step(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def peak_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def open_cpu(local_rank: int) -> Cpu:
    return Cpu()


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = text.partition("\n\n")[0].splitlines()
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
