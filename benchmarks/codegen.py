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
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from assemble import DEFINITION, assemble, faults
from gpu_code import AsTuple, generate, gpu_settings, mock_gpu, trace
from torch import Tensor, nn

from ssdctl.benchmark.train import train_flops
from ssdctl.checkpoint.format import Architecture
from ssdctl.device.cpu import Cpu
from ssdctl.model import fused
from ssdctl.model.ssd300 import network_of
from ssdctl.training.step import LossModule

MEMORY_GB_PER_S = 2700.0  # what streaming kernels reach on an H100 SXM; its peak is 3,350
TENSOR_TFLOPS = 400.0  # assumed for convolutions of this size; the bf16 peak is 989
LAUNCH_US = 2.0  # within a CUDA graph
ALIGNED = 8  # channels, for bf16 tensor cores
CAPABILITIES = (80, 90, 100)  # A100, H100, B200
STEM = (4, 64)  # channels of the images with a fourth plane, and of the stem

GROUPS = {  # by the fused kernel's name, the first that fits
    "combined kernels of several groups": r"^triton_[a-z]+_fused_\d+$",
    "max-pool": r"max_pool",
    "batch norm and ReLU": r"batch_norm|threshold_backward",
    "loss and targets": r"log_softmax|smooth_l1|nll_loss|gather|scatter|arg_?max|clamp",
    "colors": r"constant_pad|unbind|stack",
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


def build_step(
    backbone: str, extra_norm: str, batch_size: int, precision: str, boxes: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the forward of a training step and arguments without values, for `trace`."""
    with torch.device("meta"):
        model = network_of(Architecture(backbone, extra_norm, 81)).train()
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
    flop = train_flops(Architecture(options.backbone, options.extra_norm, 81))
    _print_table(parts, flop / 1e9 * options.bs)


if __name__ == "__main__":
    main()
