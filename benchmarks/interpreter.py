"""Run the Triton code that inductor generates for an H100 on the CPU, by Triton's interpreter.

Library calls (convolutions, sort, matrix products) run as ATen's of the CPU. Blocks run one after
the other: races between them do not show.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import contextlib
import inspect
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_code
import torch
from torch import Tensor, nn

LARGEST_BLOCK = 4096  # inductor leaves the mask out if this divides the size


class Interpreted:
    """A generated kernel: replaces inductor's autotuner, and runs one configuration."""

    launched: dict[str, int]  # times by name, of all kernels

    def __init__(self, function: Any, kind: str, meta: dict[str, Any]) -> None:
        self._function = function
        self._kind = kind
        self._meta = meta

    def run(self, *arguments: Any, stream: int | None = None) -> None:
        from torch._inductor.runtime import triton_heuristics

        parameters = inspect.signature(self._function.fn).parameters
        constants = [n for n, p in parameters.items() if "constexpr" in str(p.annotation)]
        given = [n for n in self._function.arg_names if n not in constants]
        bound = dict(zip(given, arguments, strict=True))
        blocks = {name: self._block(name, bound, constants) for name in constants}
        combined = (self._meta.get("combo_grid_meta") or {}).get("default_config") or {}
        blocks |= {name: value for name, value in combined.items() if name in constants}
        sizes = triton_heuristics.GridExpr.from_meta(self._meta, blocks)
        self._function[sizes.eval_slow({**bound, **blocks})](*arguments, **blocks)
        name = self._function.__name__
        self.launched[name] = self.launched.get(name, 0) + 1

    def _block(self, name: str, bound: dict[str, Any], constants: list[str]) -> Any:
        """Return the size of a block: large ones, since each costs the interpreter about the same.

        Combined kernels do not get their sizes as arguments.
        """
        is_reduction = "reduction" in self._kind
        is_tiled = "YBLOCK" in constants
        reduced = _power_of_two(bound.get("r0_numel", 1))
        columns = 64 if is_reduction or is_tiled else LARGEST_BLOCK
        if "xnumel" in bound:
            largest = 256 if is_reduction or is_tiled else LARGEST_BLOCK
            if "persistent" in self._kind:
                largest = min(LARGEST_BLOCK, max(1, 65536 // reduced))
            columns = min(_power_of_two(bound["xnumel"]), largest)
        if name.startswith("XBLOCK"):
            return columns
        if name.startswith("YBLOCK"):
            return min(_power_of_two(bound.get("ynumel", 64)), LARGEST_BLOCK // columns, 1024)
        if name.startswith("R0_BLOCK"):
            return min(reduced, 2048) if "r0_numel" in bound else 1024
        return 1 if name.startswith("RSPLIT") else self._meta.get(name)


def _power_of_two(size: Any) -> int:
    """Return the smallest one that is not below `size`."""
    return 1 << max(0, int(size) - 1).bit_length()


def interpret_kernels(folder: Path) -> None:
    """Let inductor's modules load their kernels as `Interpreted`, from now on in this process."""
    import triton.language as tl
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    def decorator(kind: str) -> Callable[..., Any]:
        def decorate(*_: Any, inductor_meta: Any = None, **__: Any) -> Callable[[Any], Interpreted]:
            return lambda function: Interpreted(function, kind, inductor_meta or {})

        return decorate

    for kind in ("pointwise", "reduction", "persistent_reduction", "foreach"):
        setattr(triton_heuristics, kind, decorator(kind))

    # The interpreter's own reductions by a function call Python for each element.
    def welford(mean: Any, m2: Any, weight: Any, dim: int) -> Any:
        total = tl.sum(weight, dim)
        center = tl.sum(mean * weight, dim) / tl.where(total == 0.0, 1.0, total)
        difference = mean - tl.expand_dims(center, dim)
        return center, tl.sum(m2 + weight * difference * difference, dim), total

    def max_with_index(value: Any, index: Any, dim: int) -> Any:
        largest = tl.max(value, dim)
        is_largest = value == tl.expand_dims(largest, dim)
        return largest, tl.min(tl.where(is_largest, index, 2**31 - 1), dim)

    triton_helpers.welford, triton_helpers.max_with_index = welford, max_with_index
    # Looked up when they are called: the interpreter replaces them while a kernel runs.
    names = ("exp", "sqrt", "rsqrt", "log", "floor", "cos", "sin", "abs")
    functions = {n: lambda x, n=n: getattr(tl, n)(x) for n in names}
    triton_helpers.libdevice = types.SimpleNamespace(**functions)

    def load(_: Any, name: str, source: str, *__: Any, **___: Any) -> Any:
        return execute(source, folder / f"{name[:100]}-{len(list(folder.iterdir()))}.py")[name]

    AsyncCompile.triton = load
    AsyncCompile.wait = lambda *_: None
    torch.cuda._DeviceGuard = lambda _: contextlib.nullcontext()
    torch.cuda.set_device = lambda _: None
    Interpreted.launched = {}


def execute(source: str, file: Path) -> dict[str, Any]:
    """Execute generated code; Triton reads the source of kernels from the file."""
    file.write_text(source)
    names = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(source, file, "exec"), names)
    return names


class Program:
    """Generated code of a module that returns a tuple: forward and backward."""

    def __init__(self, build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
        self._graphs = gpu_code.trace(build)
        nodes = {part: list(graph.graph.nodes) for part, graph in self._graphs.parts.items()}
        self._inputs = {p: [n.name for n in ns if n.op == "placeholder"] for p, ns in nodes.items()}
        self._layouts = {
            node.name: (node.meta["val"].shape, node.meta["val"].stride())
            for node in nodes.get("backward", [])
            if node.op == "placeholder" and isinstance(node.meta["val"], Tensor)
        }
        results = nodes["forward"][-1].args[0]
        self._outputs = [getattr(node, "name", None) for node in results]
        self._code: dict[str, str] = {}

    def generate(self) -> None:
        graphs = self._graphs.parts
        self._code = {
            n: gpu_code.generate(g, is_backward=n == "backward") for n, g in graphs.items()
        }

    def run(self, inputs: list[Tensor], folder: Path) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the results, and the gradients of their sum by all inputs."""
        results = self._call("forward", list(inputs), folder)
        start = self._graphs.num_changed
        returned = results[start : start + self._graphs.num_results]
        if "backward" not in self._code:
            return returned, [None] * len(inputs)
        values = dict(zip(self._inputs["forward"], inputs, strict=True))
        values |= dict(zip(self._outputs, results, strict=True))
        ones = [torch.ones_like(r) for r in returned if r.is_floating_point()]
        tangents = [name for name in self._inputs["backward"] if name.startswith("tangents")]
        values |= dict(zip(tangents, ones, strict=True))
        given = [self._in_layout(name, values[name]) for name in self._inputs["backward"]]
        return returned, self._call("backward", given, folder)

    def _in_layout(self, name: str, value: Any) -> Any:
        """Return a value in the strides that backward was generated for.

        In training, inductor hands forward's strides to it.
        """
        if not isinstance(value, Tensor) or value.stride() == self._layouts[name][1]:
            return value
        return torch.empty_strided(*self._layouts[name], dtype=value.dtype).copy_(value)

    def _call(self, part: str, inputs: list[Any], folder: Path) -> Any:
        names = execute(self._code[part], folder / f"{part}-{time.monotonic_ns()}.py")
        call = names["call"]
        module = getattr(call, "__func__", call).__globals__
        module["empty_strided_cuda"] = lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype
        )
        module["get_raw_stream"] = lambda _: 0
        return call(inputs)
