"""Assemble generated Triton kernels for NVIDIA GPUs by the ptxas of Triton's wheel, without a GPU.

`codegen.py --check` calls it. The source is the one that inductor generates for an H100, also when
another GPU is the target. Assembling says nothing about speed.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

DEFINITION = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)


class Assembled(NamedTuple):
    """One configuration of a kernel."""

    kernel: str
    registers: int  # per thread
    spilled: int  # bytes per thread
    atomics: int


def assemble(code: str, capability: int) -> list[Assembled]:
    """Assemble each configuration of each kernel in inductor's code for `sm_<capability>`."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = []
        for name, source in DEFINITION.findall(code):
            file = Path(folder, f"{name[:100]}.py")  # Triton reads the source from it
            file.write_text(source)
            names = {"__name__": name, "__file__": str(file)}
            exec(compile(source, file, "exec"), names)
            tuner: Any = names[name]
            rows += [_assemble(name, tuner, c, capability, Path(folder)) for c in tuner.configs]
    return rows


def _assemble(name: str, tuner: Any, config: Any, capability: int, folder: Path) -> Assembled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = tuner.fn.arg_names
    meta = tuner.triton_meta
    values = {**meta.get("constants", {}), **config.kwargs}
    constants = {(arguments.index(k),): v for k, v in values.items() if k in arguments}
    source = ASTSource(tuner.fn, dict(meta["signature"]), constants, meta["configs"][0])
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,  # inductor's
    }
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command: list[str | Path] = [dump, "--dump-resource-usage", binary]
    usage = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    used = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    atomics = len(re.findall(r"\b(?:atom|red)\.", kernel.asm["ptx"]))
    return Assembled(name, used["REG"], used["STACK"] + used["LOCAL"], atomics)


def faults(rows: list[Assembled]) -> list[str]:
    """Return what must not be: a kernel all of whose configurations spill, or that uses atomics."""
    by_kernel: dict[str, list[Assembled]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, []).append(row)
    spilling = [k for k, same in by_kernel.items() if all(row.spilled for row in same)]
    atomic = [k for k, same in by_kernel.items() if any(row.atomics for row in same)]
    return [f"{k} spills in all configurations" for k in spilling] + [
        f"{k} uses atomics" for k in atomic
    ]
