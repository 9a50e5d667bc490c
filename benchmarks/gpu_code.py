"""Trace modules and let inductor write their code for an H100, without a GPU.

    with gpu_settings():
        graphs = trace(build)
        mock_gpu()
        code = generate(graphs.parts["forward"], is_backward=False)

Inductor writes the Triton code for a mocked H100 on fake tensors; nothing is executed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from torch import Tensor, nn

GPU = torch.device("cuda", 0)

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
    CudaInterface.Worker.get_device_properties = staticmethod(_constant(H100))
    CudaInterface.Worker.current_device = staticmethod(_constant(0))

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
    GraphLowering.compile_to_module = GraphLowering._compile_to_module = stop
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
