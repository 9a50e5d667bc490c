"""Measure the training speed of ssdctl and of third-party training steps, in one table.

    python benchmarks/train.py                    # a CUDA GPU, under ten minutes, no network
    python benchmarks/train.py --device cpu       # two CPU cores: ResNet-34 at batch 8
    python benchmarks/train.py --layers           # each layer's time on the CPU: layers.py

Each row runs in a separate process: `ssdctl benchmark train`, with images of the shapes generator
or with fake ones, or (`third-party`) a re-implementation of the replaced systems' training step:
eager, autocast for half precisions, precomputed targets, a loss with multiplied masks and two
sorts, an optimizer that is not fused, and the loss read at every step. Its one batch is on the
device before the measurement starts, as with DALI. On a GPU kernels are searched and fp32 products
may be TF32, as in NVIDIA's program. ResNet-50 is channels-last as in that program, including the
weights, which it converts in every step; ResNet-34 is channels-first as in MLPerf's and Habana's.

A row that fails prints the reason, and the next one runs; rows that do not fit the time are listed.
The table has not been run on a GPU yet. Estimates: half a minute for an eager row, one and a half
for a compiled one, eight to nine minutes for all except the last, which compiles three times (`--bs
auto` tries two sizes), starts only if five minutes are left, and can be run with `--only auto`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import Architecture
    from ssdctl.device import Device
    from ssdctl.model.ssd300 import network_of

COLUMNS = (
    ("who", 11), ("backbone", 9), ("precision", 9), ("execution", 9), ("batch", 5), ("data", 5),
    ("img/s", 8), ("step ms", 9), ("TFLOP/s", 8), ("of peak", 7), ("GB", 6), ("epoch h", 7),
    ("warm-up s", 9),
)  # fmt: skip


class Row(NamedTuple):
    """One measurement."""

    who: str  # ssdctl or third-party
    backbone: str
    precision: str
    execution: str
    batch: str
    data: str  # fake, or real (compared with fake)

    @property
    def least_s(self) -> float:
        """Return the seconds that must be left to start it."""
        return 300 if self.batch == "auto" else 30

    @property
    def most_s(self) -> float:
        """Return the seconds after which it is stopped."""
        return 600 if self.batch == "auto" else 240


# The most important rows are first: rows that do not fit the time are skipped.
GPU = (
    Row("ssdctl", "resnet34", "bf16", "compile", "128", "real"),
    Row("third-party", "resnet34", "bf16", "eager", "128", "fake"),
    Row("ssdctl", "resnet50", "bf16", "compile", "128", "fake"),
    Row("third-party", "resnet50", "fp16", "eager", "128", "fake"),
    Row("ssdctl", "resnet50", "fp16", "compile", "128", "fake"),
    Row("ssdctl", "resnet34", "bf16", "eager", "128", "fake"),
    Row("ssdctl", "resnet34", "tf32", "compile", "128", "fake"),
    Row("third-party", "resnet34", "tf32", "eager", "128", "fake"),
    Row("ssdctl", "resnet34", "bf16", "compile", "auto", "fake"),
)
CPU = (
    Row("third-party", "resnet34", "fp32", "eager", "8", "fake"),
    Row("ssdctl", "resnet34", "fp32", "eager", "8", "real"),
    Row("ssdctl", "resnet34", "bf16", "eager", "8", "fake"),
    Row("ssdctl", "resnet34", "fp32", "compile", "8", "fake"),
    Row("third-party", "resnet34", "bf16", "eager", "8", "fake"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--minutes", type=float, default=9.5, help="of the whole table")
    parser.add_argument("--only", default="", help="only rows with this word")
    parser.add_argument("--third-party", nargs=3, metavar=("BACKBONE", "PRECISION", "BATCH"))
    parser.add_argument("--layers", action="store_true", help="the time of each layer on the CPU")
    parser.add_argument("--backbone", default="resnet34", help="of --layers")
    parser.add_argument("--precision", default="fp32", help="of --layers")
    parser.add_argument("--batch", type=int, default=8, help="of --layers")
    parser.add_argument("--ultralytics-python", help="of --layers: Python with ultralytics")
    options = parser.parse_args()
    if options.layers:
        import layers

        layers.main(options.backbone, options.precision, options.batch, options.ultralytics_python)
        return
    if options.third_party:
        backbone, precision, batch = options.third_party
        measured = measure_other(options.device, backbone, precision, int(batch), options.seconds)
        print(json.dumps(measured))
        return
    print("  ".join(f"{name:>{width}}" for name, width in COLUMNS), flush=True)
    end = time.monotonic() + 60 * options.minutes
    device = ""
    for row in CPU if options.device == "cpu" else GPU:
        if options.only and options.only not in row:
            continue
        left = end - time.monotonic()
        if left < row.least_s:
            print("no time left for:", *row, flush=True)
            continue
        metrics = measured_row(row, options.device, options.seconds, min(left, row.most_s))
        device = metrics.get("device", device)
        print(line(row, metrics), flush=True)
    print(
        f"device: {device}; peak: a measured matrix product or convolution; epoch: 117,266 images"
    )


def measured_row(row: Row, device: str, seconds: float, limit_s: float) -> dict[str, Any]:
    """Run one row in a separate process; return its output, or the error."""
    if row.who == "third-party":
        command = [sys.executable, __file__, "--device", device, "--seconds", str(seconds)]
        command += ["--third-party", row.backbone, row.precision, row.batch]
    else:
        precision = ["--fp32", "--tf32"] if row.precision == "tf32" else [f"--{row.precision}"]
        command = [sys.executable, "-m", "ssdctl", "benchmark", "train", "--json", *precision]
        command += ["--device", device, "--seconds", str(seconds), "--backbone", row.backbone]
        command += ["--bs", row.batch, "--execution", row.execution]
        command += ["--preset", "nvidia-r50"] if row.backbone == "resnet50" else []
        command += ["--fake-data"] if row.data == "fake" else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {limit_s:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    metrics: dict[str, Any] = json.loads(done.stdout)
    return metrics


def line(row: Row, result: dict[str, Any]) -> str:
    """Return a row of the table, with a second rate if real data were compared with fake data."""
    if "error" in result:
        return f"{' '.join(row)}: {result['error']}"
    cells = [
        row.who, row.backbone, row.precision, result["execution"], str(result["batch_size"]),
        row.data,
        f"{result['images_per_second']:.2f}", f"{result['step_ms']:.1f}", f"{result['tflops']:.3f}",
        f"{100 * result['peak_fraction']:.0f}%", f"{result['peak_memory_bytes'] / 1e9:.2f}",
        f"{result['coco_epoch_hours']:.3f}", f"{result['warmup_s']:.1f}",
    ]  # fmt: skip
    text = "  ".join(f"{c:>{width}}" for c, (_, width) in zip(cells, COLUMNS, strict=True))
    if "input_cost" in result:
        fake, cost = result["images_per_second_fake"], 100 * result["input_cost"]
        text += f"  (fake: {fake:.2f} img/s; real images cost {cost:.1f}%)"
    return text


def measure_other(
    device_name: str, backbone: str, precision: str, batch_size: int, seconds: float
) -> dict[str, Any]:
    """Measure the third-party training step."""
    from ssdctl.benchmark.train import peak_flops, train_flops
    from ssdctl.checkpoint.format import Architecture
    from ssdctl.data.coco_json import COCO_NUM_IMAGES
    from ssdctl.device import open_device

    device = open_device(device_name, execution="eager")
    device.blocks.enter_context(device.settings(tf32=True))
    norm = "batch" if backbone == "resnet50" else "none"
    architecture = Architecture(backbone, norm, 81)
    arithmetic = "fp32" if precision == "tf32" else precision
    step = other_step(architecture, device, arithmetic, batch_size)
    begin = time.perf_counter()
    for _ in range(3):
        step()
    device.synchronize()
    warm = time.perf_counter() - begin
    device.release_memory()  # what the search for kernels took: not counted for ours either
    steps, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step()
        steps += 1
    device.synchronize()
    spent = time.perf_counter() - begin
    memory = device.peak_memory_bytes()
    rate = batch_size * steps / spent
    achieved, peak = rate * train_flops(architecture), peak_flops(device, arithmetic)
    return {
        "images_per_second": rate,
        "step_ms": 1000 * spent / steps,
        "tflops": achieved / 1e12,
        "peak_fraction": achieved / peak,
        "peak_memory_bytes": memory,
        "coco_epoch_hours": COCO_NUM_IMAGES / rate / 3600,
        "warmup_s": warm,
        "batch_size": batch_size,
        "execution": "eager",
        "device": device.label,
    }


def other_step(
    architecture: Architecture, device: Device, precision: str, batch_size: int
) -> Callable[[], float]:
    """Return the third-party training step; its batch is on the device, as with DALI."""
    import torch
    from boxes import mlperf_loss

    from ssdctl.benchmark.train import DTYPES
    from ssdctl.boxes import default_boxes_cxcywh
    from ssdctl.input.open import random_batch

    place = device.torch_device
    # NVIDIA's program uses channels-last images, MLPerf's and Habana's do not.
    is_nvidias = architecture.backbone == "resnet50"
    layout = torch.channels_last if is_nvidias else torch.contiguous_format
    torch.manual_seed(0)
    model = network_of(architecture).to(place, memory_format=layout).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=5e-4)
    is_half = precision in ("bf16", "fp16")
    scaler = torch.amp.GradScaler(place.type, enabled=precision == "fp16")
    pixels = random_batch(batch_size, 81).images.permute(0, 3, 1, 2).float() / 255 - 0.45
    images = pixels.to(place).contiguous(memory_format=layout)
    generator = torch.Generator().manual_seed(0)
    label = torch.zeros(batch_size, len(default_boxes_cxcywh()), dtype=torch.long)
    label[:, :20] = torch.randint(1, 81, (batch_size, 20), generator=generator)
    target = torch.randn(batch_size, 4, label.shape[1], generator=generator)
    labels, targets = label.to(place), target.to(place)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast(place.type, DTYPES[precision] if is_half else None, enabled=is_half):
            offsets, logits = model(images)
        loss = mlperf_loss(offsets.float(), logits.float(), targets, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
