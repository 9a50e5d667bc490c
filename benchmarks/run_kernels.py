"""Run the Triton kernels that inductor generates for an H100 on the CPU, by Triton's interpreter.

    python benchmarks/run_kernels.py [--backbone resnet18] [--bs 2] [--precision fp32]
    python benchmarks/run_kernels.py --parts [--only matcher]

Without `--parts` it runs forward and backward of a complete step: minutes. The parts are those of
the step without a backbone, in seconds each, and every form of `model/fused.py`. Each result and
gradient is compared with those of the plain form in fp64, beside those of the plain form run by
PyTorch in the same precision. Library calls (convolutions, sort, matrix products) run as ATen's of
the CPU.

With `--extra-norm batch` the worst gradient of ResNet-18 is off by 1.8% in PyTorch and by 9.6% in the
generated kernels, which is reported as a failure. PyTorch's is off by the same 9.6%, in the same
tensor (`extra.0.3.weight`), if all weights move by half a rounding: an activation is that close to
zero, where the gradient of ReLU jumps.

This shows that the generated arithmetic and indexing are right. It does not show races between
blocks, which run one after the other here, whether a GPU's compiler and the vendor's kernels are
right, or any speed.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import argparse
import contextlib
import copy
import inspect
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import codegen
import torch
from torch import Tensor, nn

from ssdctl.boxes.default_boxes import default_boxes_cxcywh
from ssdctl.boxes.matcher import Matcher
from ssdctl.boxes.ops import box_cxcywh_to_ltrb, encode
from ssdctl.device.cpu import Cpu
from ssdctl.model import fused
from ssdctl.model.constants import RESNET
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.normalize import Normalize
from ssdctl.model.postprocess import boxes_and_scores
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.step import LossModule

LARGEST_BLOCK = 4096  # inductor leaves the mask out if this divides the size
TIMES_EAGER = 3.0  # largest error, relative to that of PyTorch's own kernels
ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}  # allowed where PyTorch's error is smaller


class Case(NamedTuple):
    """A module that is compiled in some forms, and compared with its plain form."""

    build: Callable[[], nn.Module]
    arguments: Callable[[], tuple[Tensor, ...]]  # random values
    forms: tuple[str, ...] = ()
    num_differentiable: int = 0  # of the first arguments
    precision: str = "fp32"

    def inputs(self) -> tuple[Tensor, ...]:
        arguments = self.arguments()
        for tensor in arguments[: self.num_differentiable]:
            tensor.requires_grad_()
        return arguments


class Row(NamedTuple):
    """The result of a case: errors relative to the largest value of each tensor."""

    name: str
    kernels: int
    launches: int
    seconds: float
    error: float
    eager_error: float
    is_right: bool


class _Encode(nn.Module):
    def forward(self, boxes_BN4: Tensor, defaults_N4: Tensor) -> Tensor:
        return encode(boxes_BN4, defaults_N4)


class _Decode(nn.Module):
    def forward(
        self, offsets_B4N: Tensor, logits_BCN: Tensor, defaults_N4: Tensor
    ) -> tuple[Tensor, Tensor]:
        return boxes_and_scores(offsets_B4N, logits_BCN, defaults_N4)


class _Heads(SSD300):
    def forward(self, feature: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(3, feature)


def _stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())


def _truth(count: int = 6) -> tuple[Tensor, Tensor]:
    low = torch.rand(2, count, 2) * 0.6
    boxes = torch.cat([low, low + 0.02 + 0.4 * torch.rand(2, count, 2)], dim=-1)
    labels = torch.randint(1, 5, (2, count))
    labels[:, -2:] = 0
    return boxes, labels


def _matching() -> tuple[Tensor, ...]:
    return *_truth(), box_cxcywh_to_ltrb(default_boxes_cxcywh())


def _predictions() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4, 8732), torch.randn(2, 5, 8732)


def _pictures(size: int = 40) -> tuple[Tensor, Tensor]:
    jitter = torch.rand(2, 4) * 0.1 + torch.tensor([1.0, 1.0, 1.0, 0.0])
    return torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8), jitter


def _normalize() -> nn.Module:
    return Normalize(RESNET.mean, RESNET.std)


def _forms(kind: type[nn.Module]) -> list[tuple[str, ...]]:
    """Return no form, and one for each class that replaces a module."""
    form_of = {classes[kind]: form for form, classes in fused.FORMS.items() if kind in classes}
    return [(), *((form,) for form in form_of.values())]


PARTS = {
    **{f"matcher {f}": Case(Matcher, _matching, f) for f in _forms(Matcher)},
    **{
        f"loss and mining {f}": Case(MultiboxLoss, lambda: (*_predictions(), *_truth()), f, 2)
        for f in _forms(MultiboxLoss)
    },
    **{f"normalization {f}": Case(_normalize, _pictures, f) for f in _forms(Normalize)},
    "box coder": Case(_Encode, lambda: (torch.rand(2, 8732, 4) + 0.1, default_boxes_cxcywh())),
    "decoding": Case(_Decode, lambda: (*_predictions(), default_boxes_cxcywh())),
    "heads": Case(lambda: _Heads("tiny", 5), lambda: (torch.randn(2, 32, 5, 5),), ("gpu",), 1),
    "stem": Case(_stem, lambda: (torch.randn(2, 3, 20, 20),), ("gpu",), 1),
}


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
        self._graphs = codegen.trace(build)
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
            n: codegen.generate(g, is_backward=n == "backward") for n, g in graphs.items()
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


def _tensors(module: nn.Module) -> list[Tensor]:
    named = [*module.named_parameters(remove_duplicate=False)]
    named += [*module.named_buffers(remove_duplicate=False)]
    return [tensor for _, tensor in named]


def _by_pytorch(
    module: nn.Module, arguments: tuple[Tensor, ...]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the results, and the gradients of their sum by parameters, buffers and arguments."""
    results = list(module(*arguments))
    inputs = [*_tensors(module), *arguments]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    roots = [result.sum() for result in results if result.requires_grad]
    found = iter(torch.autograd.grad(sum(roots), wanted, allow_unused=True) if roots else [])
    return results, [next(found, None) if i.requires_grad else None for i in inputs]


def _largest_error(actual: list[Any], exact: list[Any]) -> float:
    """Return the largest error relative to each tensor's largest value; of integers, any counts."""
    errors = [0.0]
    for tensor, right in zip(actual, exact, strict=True):
        if tensor is None or right is None:
            errors.append(0.0 if tensor is right else float("inf"))
        elif right.numel():
            tensor, right = tensor.detach().double(), right.detach().double()
            largest = right.abs().max().clamp(min=1e-30)
            errors.append(((tensor - right).abs().max() / largest).item())
    return max(errors)


def compare(name: str, case: Case, program: Program, folder: Path) -> Row:
    """Run a case in the generated form and in the plain one."""
    started = time.perf_counter()
    before = dict(Interpreted.launched)
    torch.manual_seed(0)
    module = codegen.AsTuple(case.build())
    arguments = case.inputs()
    exact = _in_fp64(module)
    exact_arguments = tuple(
        a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a
        for a in arguments
    )
    inputs = [t.detach().clone() for t in (*_tensors(module), *arguments)]
    results, gradients = program.run(inputs, folder)
    eager = _by_pytorch(module, arguments)
    right = _by_pytorch(exact, exact_arguments)
    error = max(_largest_error(results, right[0]), _largest_error(gradients, right[1]))
    eager_error = max(_largest_error(eager[0], right[0]), _largest_error(eager[1], right[1]))
    launched = {n: k - before.get(n, 0) for n, k in Interpreted.launched.items()}
    return Row(
        name,
        sum(count > 0 for count in launched.values()),
        sum(launched.values()),
        round(time.perf_counter() - started, 1),
        error,
        eager_error,
        error <= max(TIMES_EAGER * eager_error, ROUNDING[case.precision]),
    )


def _in_fp64(module: nn.Module) -> nn.Module:
    exact = copy.deepcopy(module).double()
    for part in exact.modules():
        if isinstance(part, LossModule):
            part._precision = "fp32"  # that is, without autocast
    return exact


def _step(options: argparse.Namespace) -> Case:
    def build() -> nn.Module:
        model = SSD300(options.backbone, 81, options.extra_norm).train()
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.to(memory_format=torch.channels_last)
        return LossModule(model, Cpu(), options.precision)

    def arguments() -> tuple[Tensor, ...]:
        boxes, labels = _truth()
        return *_pictures(300), boxes, labels

    return Case(build, arguments, ("gpu",), precision=options.precision)


def run_cases(cases: dict[str, Case]) -> list[Row]:
    """Generate all cases, then run them and print a line for each."""

    def built(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
        module = codegen.AsTuple(case.build())
        fused.swap_in(module, case.forms)
        return module, case.inputs()

    with tempfile.TemporaryDirectory() as folder, codegen.gpu_settings():
        programs = {name: Program(lambda c=case: built(c)) for name, case in cases.items()}
        codegen.mock_gpu()
        for program in programs.values():
            program.generate()
        interpret_kernels(Path(folder))
        rows = []
        for name, case in cases.items():
            rows.append(compare(name, case, programs[name], Path(folder)))
            print(f"{'ok  ' if rows[-1].is_right else 'FAIL'} {rows[-1]}", file=sys.stderr)
    return rows


def main() -> None:
    """Run the parts or a complete step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--only", default="", help="part of the names of the parts")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--extra-norm", choices=["none", "batch"], default="none")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts = {name: case for name, case in PARTS.items() if options.only in name}
    step = f"{options.backbone} {options.precision}"
    rows = run_cases(parts if options.parts else {step: _step(options)})
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
    sys.exit(not all(row.is_right for row in rows))


if __name__ == "__main__":
    main()
