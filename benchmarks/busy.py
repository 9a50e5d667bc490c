"""Measure training and detection on a machine that other programs use too.

    python benchmarks/busy.py                         # all, more than an hour
    python benchmarks/busy.py --work torch,bf16 --load none,sessions --variants default,1000

Works: `torch` (a plain training step of torchvision's ResNet-18), `fp32` and `bf16` (`ssdctl
benchmark train`, ResNet-18 at batch 8), `predict` (`ssdctl.load`, one image at a time), `onnx` and
`openvino` (the same network in these runtimes). Loads: `none`; `loops` (two busy loops per core in
this program's session); `sessions` (the same, each in a session of its own, as programs of other
users, terminals and services are); `trainings` (one other training per core); `short` (processes
that start, import and end); `memory` (programs that write to half of the free memory again and
again). Variants: variables of the OpenMP runtime, `threads` (one thread), `nice`.

Variants are measured in turn, so a load from outside affects all of them alike. Printed are the
median rate, its ratio to the default's in the same round, and the CPU time per step or image
divided by the default's without a load: what is above 1 was spent waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CORES = len(os.sched_getaffinity(0))
VARIANTS: dict[str, dict[str, str]] = {
    "default": {},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "1000": {"GOMP_SPINCOUNT": "1000"},
    "10000": {"GOMP_SPINCOUNT": "10000"},
    "blocktime": {"KMP_BLOCKTIME": "0"},  # Intel's and LLVM's OpenMP only; torch's wheel has GNU's
    "threads": {"OMP_NUM_THREADS": "1"},
    "nice": {},
}
# Each work prints the rate and the CPU seconds per item; {seconds} is the length.
TIMED = """
def rate(step, seconds=float(sys.argv[1])):
    for _ in range(3):
        step()
    start, cpu, count = time.monotonic(), time.process_time(), 0
    while time.monotonic() - start < seconds:
        step()
        count += 1
    wall = time.monotonic() - start
    print(json.dumps([count / wall, (time.process_time() - cpu) / count]))
"""
TORCH = """
import torch
from torchvision.models import resnet18
model = resnet18()
optimizer = torch.optim.SGD(model.parameters(), 0.01)
images, labels = torch.randn(8, 3, 128, 128), torch.randint(0, 1000, (8,))
def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
rate(step)
"""
TRAIN = """
from ssdctl.checkpoint.format import Architecture
from ssdctl.model.ssd300 import network_of
from ssdctl.config.resolve import resolve
from ssdctl.device import open_device
from ssdctl.runtime.system import tune_process
from ssdctl.input.open import random_batch
from ssdctl.training.step import build_step
tune_process()
device, config, precision = open_device("cpu"), resolve(environment={}).train, sys.argv[3]
model = device.place(network_of(Architecture("resnet18", "none", 81))).train()
step = build_step(model, config, device, precision)
batch = random_batch(8, 81, 7)
rate(lambda: step([batch], 1e-6))
"""
MODEL = """
import numpy as np, torch
from ssdctl.checkpoint.format import Architecture
from ssdctl.model.ssd300 import network_of
model = network_of(Architecture("resnet18", "none", 81)).eval()
image = np.random.default_rng(0).random((1, 3, 300, 300), np.float32)
"""
PREDICT = (
    MODEL
    + """
tensor = torch.from_numpy(image)
def step():
    with torch.inference_mode():
        model(tensor)
rate(step)
"""
)
EXPORT = (
    MODEL
    + """
import logging, warnings
warnings.simplefilter("ignore"); logging.disable()
path = os.path.join(sys.argv[2], "model.onnx")
if not os.path.exists(path):
    example = (torch.from_numpy(image),)
    torch.onnx.export(model, example, path, input_names=["images"], verbose=False)
"""
)
ONNX = (
    EXPORT
    + """
import onnxruntime
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
rate(lambda: session.run(None, {"images": image}))
"""
)
OPENVINO = (
    EXPORT
    + """
import openvino
compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
rate(lambda: compiled([image]))
"""
)
WORKS = {"torch": TORCH, "fp32": TRAIN, "bf16": TRAIN, "predict": PREDICT, "onnx": ONNX,
         "openvino": OPENVINO}  # fmt: skip
LOOP = "while True: pass"
SHORT = "while true; do {python} -c 'import json, email, http.client, sqlite3'; done"
MEMORY = """
block = bytearray({size})
while True:
    for place in range(0, len(block), 4096):
        block[place] = (block[place] + 1) % 256
"""
LOADS = ("none", "loops", "sessions", "trainings", "short", "memory")


def main() -> None:
    """Measure each work under each load with each variant, and print a table for each load."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, choices in (("work", tuple(WORKS)), ("load", LOADS), ("variants", tuple(VARIANTS))):
        parser.add_argument(f"--{name}", default=",".join(choices), help=f"of {', '.join(choices)}")
    parser.add_argument("--seconds", type=float, default=6, help="length of each measurement")
    parser.add_argument("--pairs", type=int, default=2, help="rounds over the variants")
    options = parser.parse_args()
    variants = options.variants.split(",")
    print(f"{CORES} cores; median rate (ratio to default in the same round; CPU per item)")
    print(f"{'load':<10}{'work':<9}" + "".join(f"{name:>22}" for name in variants), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for load in options.load.split(","):
            for work in options.work.split(","):
                rounds = []
                with busy(load, Path(folder)):
                    for _ in range(options.pairs):
                        rounds.append([measure(work, v, options.seconds, folder) for v in variants])
                print(f"{load:<10}{work:<9}{cells(rounds)}  load {os.getloadavg()[0]:.0f}",
                      flush=True)  # fmt: skip


def cells(rounds: list[list[tuple[float, float]]]) -> str:
    """Return the columns of one row, by the medians over the rounds."""
    texts = []
    for column in zip(*rounds, strict=True):
        rate = statistics.median(rate for rate, _ in column)
        ratio = statistics.median(
            rate / first[0] for (rate, _), first in zip(column, (r[0] for r in rounds), strict=True)
        )
        cpu = statistics.median(cpu for _, cpu in column)
        texts.append(f"{rate:8.2f} ({ratio:.2f}; {cpu:.2f})")
    return "".join(f"{text:>22}" for text in texts)


def measure(work: str, variant: str, seconds: float, folder: str) -> tuple[float, float]:
    """Run one work in a session of its own; return items per second and CPU seconds per item."""
    code = "import json, os, sys, time\n" + TIMED + WORKS[work]
    arguments = [str(seconds), folder, work]
    done = subprocess.run(
        [*(["nice"] if variant == "nice" else []), sys.executable, "-c", code, *arguments],
        env={**os.environ, **VARIANTS[variant]}, stdout=subprocess.PIPE, text=True, check=True,
        start_new_session=True,
    )  # fmt: skip
    rate, cpu = json.loads(done.stdout.splitlines()[-1])
    return rate, cpu


@contextlib.contextmanager
def busy(load: str, folder: Path) -> Iterator[None]:
    """Keep the machine busy inside the block."""
    python, own_session = sys.executable, load != "loops"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    commands = {
        "none": [],
        "loops": [[python, "-c", LOOP]] * 2 * CORES,
        "sessions": [[python, "-c", LOOP]] * 2 * CORES,
        "trainings": [[python, "-c", "import json, os, sys, time\n" + TIMED + TORCH, "1e6"]]
        * CORES,
        "short": [["sh", "-c", SHORT.format(python=python)]] * 2 * CORES,
        "memory": [[python, "-c", MEMORY.format(size=free // 4)]] * 2,
    }[load]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, preexec_fn=os.setsid if own_session else os.setpgrp
        )
        for command in commands
    ]
    try:
        if processes:
            time.sleep(3)
        yield
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    main()
