"""Report the version of torch and the devices that it detects, as lines of JSON.

Runs as a subprocess, because a broken driver may crash or block it; the lines printed until then
are still used.
"""

from __future__ import annotations

import time
from typing import Any

from ssdctl.doctor.subprocess_probe import report


def main() -> None:
    start = time.perf_counter()
    import torch

    report(torch=torch.__version__, import_s=time.perf_counter() - start)
    import torch.distributed as dist

    report(has_gloo=dist.is_available() and dist.is_gloo_available())
    from ssdctl.device import inductor
    from ssdctl.device.cpu import Cpu

    cpu = Cpu()
    report(
        cpu={
            "label": cpu.label,
            "has_native_bf16": cpu.has_native_bf16,
            "compile": inductor.resolve_execution("compile")[1],
        }
    )
    report(cuda_build=torch.version.cuda)
    gpus, problem = _gpus()
    report(gpus=gpus, gpu_problem=problem, gpu_compile=_gpu_compile() if gpus else ())


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """Return the GPUs, and the reason if there are none."""
    import torch

    if torch.version.cuda is None:
        return [], "this torch is built without CUDA"
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        return [], str(error).strip().partition("\n")[0]
    built_for = torch.cuda.get_arch_list()
    gpus = []
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": facts.name,
                "memory_bytes": facts.total_memory,
                "capability": [facts.major, facts.minor],
                "has_kernels": _has_kernels(facts.major, facts.minor, built_for),
            }
        )
    return gpus, "" if gpus else "no GPU"


def _has_kernels(major: int, minor: int, built_for: list[str]) -> bool:
    """Return whether torch has kernels for a card: binaries of its major version, or older PTX."""
    for name in built_for:
        kind, _, digits = name.partition("_")
        digits = "".join(filter(str.isdigit, digits))
        if not digits:
            continue
        version = (int(digits[:-1] or 0), int(digits[-1]))
        if version <= (major, minor) and (kind == "compute" or version[0] == major):
            return True
    return not built_for


def _gpu_compile() -> tuple[str, ...]:
    import torch

    from ssdctl.device import inductor

    return inductor.resolve_execution("compile", torch.cuda.get_device_capability(0))[1]


if __name__ == "__main__":
    main()
