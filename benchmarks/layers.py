"""Where the time of a training step on the CPU goes: each convolution, and everything else.

    python benchmarks/train.py --layers [--backbone resnet18] [--precision bf16] [--batch 8]
        [--ultralytics-python VENV/bin/python]

Convolutions are grouped by shape and direction. `limit` is the larger of their FLOP at the measured
peak and their bytes (input, output and weights once each) at the measured bandwidth; `alone` is
the same convolution repeated outside of the step. `of limit` is the limit divided by the time in
the step. What is not a convolution is grouped by kind. Times are medians of steps in milliseconds.
The last lines are the steps of torchvision's ssd300_vgg16 and ultralytics' yolo11n (peer_step.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.grad import conv2d_input, conv2d_weight
from torch.profiler import ProfilerActivity, profile

from ssdctl.benchmark.train import DTYPES, peak_flops
from ssdctl.checkpoint.format import Architecture
from ssdctl.config.resolve import resolve
from ssdctl.device import open_device
from ssdctl.input.open import random_batch
from ssdctl.model.ssd300 import network_of
from ssdctl.training.step import build_step

STEPS = 5
ROWS = 24  # of the table; the convolutions that take the longest
COPIED_MB = 256
KINDS = {
    "batch norm": ("batch_norm",),
    "ReLU and pooling": ("relu", "threshold", "clamp_min", "max_pool"),
    "copies and layouts": ("copy_", "to_copy", "contiguous", "cat", "clone", "fill_", "zero_"),
    "optimizer": ("_foreach", "_fused", "sgd"),
    "loss": ("sort", "topk", "log_softmax", "nll", "smooth_l1", "logsumexp", "gather", "scatter"),
}


class Convolution(NamedTuple):
    """A convolution of the network: its shapes, and how often the network has it."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: int
    padding: int
    dilation: int

    @property
    def output(self) -> tuple[int, ...]:
        reach = self.dilation * (self.weight[2] - 1)
        side = (self.input[2] + 2 * self.padding - reach - 1) // self.stride + 1
        return (self.input[0], self.weight[0], side, side)

    @property
    def flops(self) -> float:
        """The FLOP of one direction: forward, gradient of the input, or gradient of the weights."""
        batch, channels, height, width = self.output
        return 2.0 * batch * channels * height * width * self.weight[1] * self.weight[2] ** 2

    def num_bytes(self, element: int) -> float:
        shapes = (self.input, self.weight, self.output)
        return float(element * sum(torch.Size(shape).numel() for shape in shapes))


def convolutions(model: nn.Module, batch: int) -> dict[Convolution, int]:
    """Count the convolutions of a network by shape."""
    found: dict[Convolution, int] = defaultdict(int)

    def note(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        numbers = (module.stride[0], int(module.padding[0]), module.dilation[0])
        found[Convolution(tuple(inputs[0].shape), tuple(module.weight.shape), *numbers)] += 1

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        model(torch.zeros(batch, 3, 300, 300))
    for hook in hooks:
        hook.remove()
    return found


def alone(
    shape: Convolution, dtype: torch.dtype, *, needs_input_gradient: bool
) -> dict[str, float]:
    """Return the fastest times of a convolution outside of the step, by direction, in seconds."""
    layout = torch.channels_last
    x = torch.randn(shape.input).to(dtype).contiguous(memory_format=layout)
    w = torch.randn(shape.weight).to(dtype).contiguous(memory_format=layout)
    gradient = torch.randn(shape.output).to(dtype).contiguous(memory_format=layout)
    numbers = (shape.stride, shape.padding, shape.dilation)
    work: dict[str, Any] = {
        "forward": lambda: nn.functional.conv2d(x, w, None, *numbers),
        "weights": lambda: conv2d_weight(x, shape.weight, gradient, *numbers),
    }
    if needs_input_gradient:
        work["input"] = lambda: conv2d_input(shape.input, w, gradient, *numbers)
    times = {}
    for name, run in work.items():
        run()
        spent = []
        while len(spent) < 3 or (sum(spent) < 0.3 and len(spent) < 30):
            start = time.perf_counter()
            run()
            spent.append(time.perf_counter() - start)
        times[name] = min(spent)
    return times


def bandwidth() -> float:
    """Return the bytes per second of a copy in memory, reads and writes counted."""
    source = torch.zeros(COPIED_MB * 2**20, dtype=torch.uint8)
    target = torch.empty_like(source)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.numel() / min(times)


def kind_of(name: str) -> str:
    return next((k for k, words in KINDS.items() if any(w in name for w in words)), "other")


def profiled(backbone: str, precision: str, batch: int) -> tuple[list[Any], float]:
    """Return the operators of some steps by their shapes, and the seconds of a step."""
    device = open_device("cpu", execution="eager")
    model = device.place(network_of(Architecture(backbone, "none", 81), 0)).train()
    step = build_step(model, resolve(environment={"HOME": "/"}).train, device, precision)
    images = random_batch(batch, 81, max_boxes=12)
    for _ in range(3):
        step([images], 1e-6)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        step([images], 1e-6)
        times.append(time.perf_counter() - start)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(STEPS):
            step([images], 1e-6)
    return list(profiler.key_averages(group_by_input_shape=True)), sorted(times)[STEPS // 2]


def peer_line(python: str, peer: str, precision: str, batch: int, peak: float) -> str:
    """Measure the step of another program in a separate process."""
    script = Path(__file__).with_name("peer_step.py")
    command = [python, str(script), peer, "--precision", precision, "--batch", str(batch)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    measured = json.loads(done.stdout)
    seconds, flops = measured["step_s"], measured["flops"]
    return (
        f"{peer}: {batch / seconds:.2f} img/s, {flops / batch / 1e9:.1f} GFLOP an image, "
        f"{flops / seconds / peak:.1%} of the peak"
    )


def main(backbone: str, precision: str, batch: int, ultralytics_python: str | None) -> None:
    dtype = DTYPES[precision]
    device = open_device("cpu", execution="eager")
    peak, bytes_s = peak_flops(device, precision), bandwidth()
    events, step_s = profiled(backbone, precision, batch)
    shapes = convolutions(network_of(Architecture(backbone, "none", 81), 0).eval(), batch)
    in_step: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0.0])
    others: dict[str, float] = defaultdict(float)
    for event in events:
        seconds = event.self_cpu_time_total / 1e6 / STEPS
        is_backward = "convolution_backward" in event.key
        if is_backward or event.key in ("aten::mkldnn_convolution", "aten::convolution"):
            first = 1 if is_backward else 0
            key = tuple(map(tuple, event.input_shapes[first : first + 2]))
            in_step[key][is_backward] += seconds
        else:
            others[kind_of(event.key)] += seconds
    print(
        f"{backbone}, {precision}, batch {batch}, {torch.get_num_threads()} threads, "
        f"{torch.__version__}: step {1000 * step_s:.0f} ms; peak {peak / 1e12:.3f} TFLOP/s, "
        f"{bytes_s / 1e9:.1f} GB/s\n"
    )
    print("| convolution | count | GFLOP | MB | ms | limit | alone | of limit |")
    print("|---|---|---|---|---|---|---|---|")
    total = defaultdict(float)
    element = torch.empty(0, dtype=dtype).element_size()
    first_input = next(iter(shapes)).input
    rows = []
    for shape, count in shapes.items():
        has_input = shape.input != first_input
        spent = in_step.get((shape.input, shape.weight), [0.0, 0.0])
        single = alone(shape, dtype, needs_input_gradient=has_input)
        least = max(shape.flops / peak, shape.num_bytes(element) / bytes_s)
        _, c, h, _ = shape.input
        label = f"{c} x {h} x {h} -> {shape.weight[0]}, {shape.weight[2]} x {shape.weight[2]}"
        label += f" / {shape.stride}" if shape.stride > 1 else ""
        backward = count * sum(single.values()) - count * single["forward"]
        for direction, n, alone_s, seconds in (
            ("forward", count, count * single["forward"], spent[0]),
            ("backward", count * (1 + has_input), backward, spent[1]),
        ):
            values = {
                "flops": n * shape.flops, "bytes": n * shape.num_bytes(element),
                "s": seconds, "limit": n * least, "alone": alone_s,
            }  # fmt: skip
            for name, value in values.items():
                total[name] += value
            rows.append((seconds, f"{label}, {direction}", count, values))
    for _, label, count, v in sorted(rows, key=lambda row: -row[0])[:ROWS]:
        print(_line(label, count, v))
    print(_line("all convolutions", sum(shapes.values()), total))
    accounted = total["s"] + sum(others.values())
    print("\n| part of the step | ms | share |\n|---|---|---|")
    parts = {"convolutions": total["s"], **others}
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"| {name} | {1000 * seconds:.1f} | {seconds / accounted:.1%} |")
    print(
        f"\nThe whole step: {batch / step_s:.2f} img/s, {total['flops'] / batch / 1e9:.1f} GFLOP "
        f"an image, {total['flops'] / step_s / peak:.1%} of the peak"
    )
    pythons = {"torchvision": sys.executable, "ultralytics": ultralytics_python}
    for peer, python in pythons.items():
        if python:
            print(peer_line(python, peer, precision, batch, peak))


def _line(label: str, count: int, v: dict[str, float]) -> str:
    fraction = f"{v['limit'] / v['s']:.0%}" if v["s"] else ""
    return (
        f"| {label} | {count} | {v['flops'] / 1e9:.1f} | {v['bytes'] / 1e6:.0f} "
        f"| {1000 * v['s']:.1f} | {1000 * v['limit']:.1f} | {1000 * v['alone']:.1f} | {fraction} |"
    )
