"""Count the kernels and bytes of a compiled training step on an H100, without a GPU.

    python benchmarks/codegen.py [--backbone resnet34] [--bs 128] [--json] [--check] [--keep DIR]

Inductor writes the Triton code of the step for a mocked H100 on fake tensors; nothing is executed.
The number of kernels is counted in the generated code, and inductor estimates the bytes that each
kernel moves (`kernel_num_gb`). Convolutions are vendor kernels: they are counted, their bytes are
not. Predicted times are a roofline: bytes over the memory's rate, and the convolutions' arithmetic
over 400 TFLOP/s. That rate is assumed, not measured, and most of the total rests on it.

`--check` fails if a kernel uses atomics, if a convolution other than the stem has a number of
channels that tensor cores cannot use, or if ptxas (`assemble.py`) reports that all configurations
of a kernel spill registers. Each compute capability (`--sm`) takes a minute or two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from assemble import DEFINITION, assemble, faults
from torch import Tensor, nn

GPU = torch.device("cuda", 0)
MEMORY_GB_PER_S = 2700.0  # of 3,350: what streaming kernels reach on an H100 SXM
TENSOR_TFLOPS = 400.0  # of 989 in bf16: assumed of convolutions of this size
LAUNCH_US = 2.0  # within a CUDA graph
ALIGNED = 8  # channels, for bf16 tensor cores
CAPABILITIES = (80, 90, 100)  # of the A100, the H100 and the B200
STEM = (4, 64)  # channels of the images with a fourth plane, and of the stem

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    warp_size=32,
    gcnArchName="",
    L2_cache_size=50 << 20,
    max_threads_per_block=1024,
    shared_memory_per_block_optin=232448,
    shared_memory_per_block=49152,
)
GROUPS = {  # by the fused kernel's name, the first that fits
    "combined kernels of several groups": r"^triton_[a-z]+_fused_\d+$",
    "max-pool": r"max_pool",
    "batch norm and ReLU": r"batch_norm|threshold_backward",
    "loss and targets": r"log_softmax|smooth_l1|nll_loss|gather|scatter|arg_?max|clamp",
    "colours": r"constant_pad|unbind|stack",
    "biases, layouts and precision": r"convolution|to_copy|cat",
}


class Kernel(NamedTuple):
    """A generated kernel: its name, estimated GB of a launch, and launches in a step."""

    name: str
    gigabytes: float
    launches: int


class Generated(NamedTuple):
    """Summary of one generated graph."""

    kernels: list[Kernel]
    convolutions: int
    others: list[str]  # further calls of library kernels
    atomics: int  # additions of that kind in the generated kernels

    @property
    def launches(self) -> int:
        return sum(k.launches for k in self.kernels) + len(self.others)

    @property
    def gigabytes(self) -> float:
        return sum(k.gigabytes * k.launches for k in self.kernels)


def mock_gpu() -> None:
    """Replace the driver queries of PyTorch, inductor and Triton by the values of an H100."""
    constants: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "get_device_properties": H100,
            "is_available": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_capability": (9, 0),
            "get_device_name": H100.name,
            "is_bf16_supported": True,
            "is_initialized": False,
            "_lazy_init": None,
            "synchronize": None,
            "set_rng_state": None,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8),
            "_exchange_device": 0,
            "_maybe_exchange_device": 0,
        },
        torch._C: {"_cuda_exchangeDevice": 0, "_cuda_maybeExchangeDevice": 0},
    }
    for module, answers in constants.items():
        for name, answer in answers.items():
            setattr(module, name, _constant(answer))
    from torch._dynamo.device_interface import CudaInterface

    interface = {
        "get_compute_capability": 90,
        "current_device": 0,
        "is_available": True,
        "get_device_properties": H100,
        "get_raw_stream": 0,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "synchronize": None,
    }
    for name, answer in interface.items():
        setattr(CudaInterface, name, staticmethod(_constant(answer)))
    # mypy refuses assignments to methods: this and the next ones replace PyTorch's for the H100.
    CudaInterface.Worker.get_device_properties = staticmethod(_constant(H100))  # type: ignore
    CudaInterface.Worker.current_device = staticmethod(_constant(0))  # type: ignore

    from torch._dynamo import utils
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    utils.preserve_rng_state = contextlib.nullcontext
    triton_helpers.set_driver_to_gpu = _constant(None)
    target = types.SimpleNamespace(
        get_current_target=_constant(GPUTarget("cuda", 90, 32)),
        get_active_torch_device=_constant(GPU),
        get_current_device=_constant(0),
        get_current_stream=_constant(0),
    )
    driver._active = driver._default = target


def _constant(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def _convolution_format(images: Tensor, weight: Tensor, *_: Any) -> torch.memory_format:
    """cuDNN computes channels-last if the input or the weight is."""
    for tensor in (images, weight):
        if torch._prims_common.suggest_memory_format(tensor) == torch.channels_last:
            return torch.channels_last
    return torch.contiguous_format


class Graphs(NamedTuple):
    """The traced graphs of a module."""

    parts: dict[str, torch.fx.GraphModule]  # forward, and backward if something needs a gradient
    num_changed: int  # buffers that forward changes: its first outputs
    num_results: int  # its next outputs; values for backward follow


def trace(build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> Graphs:
    """Trace a module that returns a tuple, and its backward, on fake tensors.

    Args:
        build: Returns the module and its arguments; called where all new tensors are fake.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx, lowering  # noqa: F401  (they register decompositions)
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode

    parts: dict[str, torch.fx.GraphModule] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
            parts[name] = graph
            return make_boxed_func(graph.forward)

        return compiler

    def partition(graph: Any, inputs: Any, **options: Any) -> Any:
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **options)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    context = TracingContext(mode)
    with mode, _tracing_for_gpus():
        module, arguments = build()
        with config.patch(force_non_lazy_backward_lowering=True), tracing(context):
            aot_module_simplified(
                module,
                arguments,
                fw_compiler=keep("forward"),
                bw_compiler=keep("backward"),
                partition_fn=partition,
                decompositions=select_decomp_table(),
            )(*arguments)
    facts = context.fw_metadata
    assert facts is not None
    return Graphs(parts, facts.num_mutated_inp_runtime_indices, facts.num_outputs)


def build_step(
    backbone: str, extra_norm: str, batch_size: int, precision: str, boxes: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the forward of a training step and arguments without values, for `trace`."""
    from ssdctl.device.cpu import Cpu
    from ssdctl.model import fused
    from ssdctl.model.ssd300 import Architecture
    from ssdctl.training.step import LossModule

    with torch.device("meta"):
        model = Architecture(backbone, extra_norm, 81).build().train()
    _materialize(model)
    module = AsTuple(LossModule(model, Cpu(), precision))
    fused.swap_in(module, ("gpu",))
    return module, (
        torch.empty(batch_size, 300, 300, 3, dtype=torch.uint8),
        torch.empty(batch_size, 4),
        torch.empty(batch_size, boxes, 4),
        torch.empty(batch_size, boxes, dtype=torch.int64),
    )


def _materialize(model: nn.Module) -> None:
    """Replace tensors of the meta device by fake ones, convolutions channels-last."""

    def empty(tensor: Tensor) -> Tensor:
        layout = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
        return torch.empty(tensor.shape, dtype=tensor.dtype, memory_format=layout)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(empty(parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = empty(buffer)


@contextlib.contextmanager
def _tracing_for_gpus() -> Iterator[None]:
    """Let modules take the branches of a compiled step, and convolutions the layout of cuDNN.

    The tensors are fake ones of the CPU: autograd asks the driver about those of a GPU.
    """
    replaced = {
        (torch.compiler, "is_compiling"): _constant(True),
        (torch._C, "_select_conv_backend"): _constant(None),  # these look for cuDNN
        (torch._C, "_conv_determine_backend_memory_format"): _convolution_format,
    }
    before = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


def _move_to_gpu(graph: torch.fx.GraphModule, mode: Any) -> list[Any]:
    """Replace the graph's fake tensors by those of a GPU and return its inputs."""
    from torch.utils._pytree import tree_map

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return GPU if isinstance(value, torch.device) else value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(move, node.meta["val"])
        node.meta.pop("tensor_meta", None)
        node.meta.pop("example_value", None)
        node.args = tree_map(lambda a: GPU if isinstance(a, torch.device) else a, node.args)
        kwargs = dict(node.kwargs)
        node.kwargs = tree_map(lambda a: GPU if isinstance(a, torch.device) else a, kwargs)
    graph.recompile()
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


class AsTuple(nn.Module):
    """Returns the result of a module as a tuple, as a graph needs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        result = self.module(*arguments)
        return (result,) if isinstance(result, Tensor) else tuple(result)


class _StopError(Exception):
    """Raised instead of loading the generated code."""


@contextlib.contextmanager
def gpu_settings() -> Iterator[None]:
    """Set inductor's options of a training step on a GPU."""
    from torch._inductor import config

    from ssdctl.device import inductor

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        settings = {k: v for k, v in inductor.gpu_options().items() if k != "triton.cudagraphs"}
        inductor.keep_pool_backward()
        with config.patch({**settings, "fx_graph_cache": False, "benchmark_kernel": True}):
            yield


def generate(graph: torch.fx.GraphModule, *, is_backward: bool) -> str:
    """Return inductor's code of a graph."""
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    code: list[str] = []

    def stop(lowering: Any) -> None:
        generated = lowering.codegen()[0]
        code.append(getattr(generated, "value", generated))
        raise _StopError

    # Assignments to methods, which mypy refuses: the code is kept, not compiled.
    GraphLowering.compile_to_module = GraphLowering._compile_to_module = stop  # type: ignore
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = _move_to_gpu(graph, mode)
    try:
        with _tracing_for_gpus(), tracing(TracingContext(mode)):
            compile_fx.compile_fx_inner(
                graph,
                inputs,
                static_input_idxs=[],
                cudagraphs=False,
                is_backward=is_backward,
                boxed_forward_device_index=None,
            )
    except Exception:
        if not code:
            raise
    return code[0]


def summarize(code: str) -> Generated:
    """Count kernels, launches and bytes in generated code."""
    # The last one: each kernel's own benchmark, before it, has a `call` as well.
    call = code[code.rindex("def call(") :].partition("def benchmark_compiled_module")[0]
    kernels = []
    for match in DEFINITION.finditer(code):
        gigabytes = re.search(r"kernel_num_gb': ([0-9.e-]+)", match[2])
        launches = len(re.findall(rf"{match[1]}\.run\(", call))
        kernels.append(Kernel(match[1], float(gigabytes[1]) if gigabytes else 0.0, launches))
    library = re.findall(r"(?:extern_kernels\.\w+|(?:torch\.ops\.)?\baten\.[\w.]+)\(", call)
    others = [name for name in library if "convolution" not in name]
    return Generated(kernels, len(library) - len(others), others, code.count("tl.atomic_add("))


def unaligned_channels(forward: torch.fx.GraphModule) -> list[tuple[int, int]]:
    """Return the input and output channels of convolutions that waste tensor cores."""
    weights = [
        node.args[1].meta["val"]
        for node in forward.graph.nodes
        if node.target == torch.ops.aten.convolution.default
    ]
    channels = [(weight.shape[1], weight.shape[0]) for weight in weights]
    return [pair for pair in channels if pair != STEM and any(n % ALIGNED for n in pair)]


def gigaflop(backbone: str, extra_norm: str, batch_size: int) -> float:
    """Count the arithmetic of the network's forward and backward, a multiply-add as two."""
    from torch.utils.flop_counter import FlopCounterMode

    from ssdctl.model.ssd300 import SSD300

    with torch.device("meta"):
        model = SSD300(backbone, 81, extra_norm)
        images = torch.empty(2, 3, 300, 300)
    with FlopCounterMode(display=False) as counter:
        offsets, logits = model(images)
        (offsets.sum() + logits.sum()).backward()
    return counter.get_total_flops() / 1e9 * batch_size / 2


def _group(kernel: Kernel) -> str:
    for group, pattern in GROUPS.items():
        if re.search(pattern, kernel.name):
            return group
    return "other"


def _print_table(parts: dict[str, Generated], flop: float) -> None:
    rows: dict[tuple[str, str], list[float]] = {}
    for part, generated in parts.items():
        for kernel in generated.kernels:
            row = rows.setdefault((part, _group(kernel)), [0, 0.0])
            row[0] += kernel.launches
            row[1] += kernel.launches * kernel.gigabytes
    print("| part | group | launches | GB | predicted ms |")
    print("|---|---|---|---|---|")
    total = 0.0
    for (part, group), (launches, gigabytes) in sorted(rows.items(), key=lambda r: -r[1][1]):
        milliseconds = max(gigabytes / MEMORY_GB_PER_S, launches * LAUNCH_US / 1e6) * 1e3
        total += milliseconds
        print(f"| {part} | {group} | {launches:.0f} | {gigabytes:.2f} | {milliseconds:.2f} |")
    for part, generated in parts.items():
        print(f"| {part} | library calls: {_counts(generated.others)} | | | |")
    convolutions = sum(g.convolutions for g in parts.values())
    milliseconds = flop / TENSOR_TFLOPS
    total += milliseconds
    print(f"| both | convolutions, {flop:.0f} GFLOP | {convolutions} | | {milliseconds:.2f} |")
    print(f"| both | all | | | {total:.2f} |")
    print(f"\nThe total rests on an assumed {TENSOR_TFLOPS:.0f} TFLOP/s of the convolutions.")


def _counts(names: list[str]) -> str:
    short = [name.rstrip("(").split(".", 1)[-1] for name in names]
    return ", ".join(f"{n} x {short.count(n)}" for n in dict.fromkeys(short)) or "none"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--extra-norm", choices=["none", "batch"], default="none")
    parser.add_argument("--bs", type=int, default=128)
    parser.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--boxes", type=int, default=93, help="most boxes of an image")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the generated code here")
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="list the N largest")
    parser.add_argument("--check", action="store_true", help="assemble, and fail on faults")
    parser.add_argument(
        "--sm", type=int, nargs="+", default=CAPABILITIES, help="what --check is for"
    )
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _check(
    code: dict[str, str], unaligned: list[tuple[int, int]], capabilities: Sequence[int]
) -> None:
    found = [f"a convolution has {i} and {o} channels" for i, o in unaligned]
    for capability in capabilities:
        rows = [row for text in code.values() for row in assemble(text, capability)]
        found += [f"sm_{capability}: {fault}" for fault in faults(rows)]
        spilling = sum(row.spilled > 0 for row in rows)
        print(
            f"sm_{capability}: {len({row.kernel for row in rows})} kernels, {len(rows)} "
            f"configurations, {spilling} of them spill; at most "
            f"{max(row.registers for row in rows)} registers",
            file=sys.stderr,
        )
    if found:
        raise SystemExit("\n".join(found))


def main() -> None:
    """Generate, count and print."""
    options = _parse()
    step = (options.backbone, options.extra_norm, options.bs, options.precision, options.boxes)
    with gpu_settings():
        graphs = trace(lambda: build_step(*step)).parts
        mock_gpu()
        code = {n: generate(g, is_backward=n == "backward") for n, g in graphs.items()}
    parts = {name: summarize(text) for name, text in code.items()}
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name, text in code.items():
            (options.keep / f"{options.backbone}-{name}.py").write_text(text)
    unaligned = unaligned_channels(graphs["forward"])
    if options.check:
        _check(code, unaligned, options.sm)
    if options.json:
        result: dict[str, float] = {f"launches_{n}": p.launches for n, p in parts.items()}
        result |= {f"gigabytes_{n}": round(p.gigabytes, 2) for n, p in parts.items()}
        result["atomics"] = sum(part.atomics for part in parts.values())
        result["unaligned_convolutions"] = len(unaligned)
        print(json.dumps(result))
        return
    for name, part in parts.items():
        print(f"{name}: {part.launches} launches, {part.gigabytes:.2f} GB")
        for kernel in sorted(part.kernels, key=lambda k: -k.gigabytes * k.launches):
            if options.kernels > 0:
                print(f"  {kernel.gigabytes:.3f} GB x {kernel.launches} {kernel.name}")
                options.kernels -= 1
    _print_table(parts, gigaflop(options.backbone, options.extra_norm, options.bs))


if __name__ == "__main__":
    main()
