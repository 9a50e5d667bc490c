"""Programs of the doctor that may hang or crash: `-m ssdctl.doctor.probes NAME` runs probe_NAME.

Each prints facts as lines of JSON; those printed before a crash are still used.
`check_collectives` is called by every rank of `ssdctl launch ... -- doctor --collectives`, a health
check of all cards and of the network between them before a long run.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ssdctl.doctor import OK, Check, result
from ssdctl.errors import SsdctlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ssdctl.config import Config
    from ssdctl.device import Device
    from ssdctl.distributed.ranks import Ranks

SIZE, BLOCK = 64 * 2**20, 4 * 2**20  # bytes that the disk is tested with
DEADLINE_S = 8.0  # a slow disk is measured with fewer bytes
NUMBERS = 2**20  # 4 MB, about a layer's gradients
TIMEOUT_S = 60.0
BATCH_SIZE = 1  # a step on two cores takes a second or two
LR = 1e-4
STEP_CLASSES, COCO_OUTPUTS = 21, 81  # with background
REPEATS = 5
SLOW = 0.8  # relative to the fastest card
COLLECTIVES_S = 300.0


def report(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def probe_torch() -> None:
    """Report the version of torch and the devices that it detects."""
    start = time.perf_counter()
    import torch

    report(torch=torch.__version__, import_s=time.perf_counter() - start)
    import torch.distributed as dist

    report(has_gloo=dist.is_available() and dist.is_gloo_available())
    from ssdctl.device import inductor
    from ssdctl.device.cpu import Cpu

    cpu = Cpu()
    compiles = inductor.resolve_execution("compile")[1]
    has_bf16 = cpu.auto_precision == "bf16"
    report(cpu={"label": cpu.label, "has_native_bf16": has_bf16, "compile": compiles})
    report(cuda_build=torch.version.cuda)
    gpus, problem = _gpus()
    compiles = inductor.resolve_execution("compile", gpus[0]["capability"])[1] if gpus else ()
    report(gpus=gpus, gpu_problem=problem, gpu_compile=compiles)


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
    gpus = [
        {
            "name": facts.name,
            "memory_bytes": facts.total_memory,
            "capability": (facts.major, facts.minor),
            "has_kernels": _has_kernels((facts.major, facts.minor), built_for),
        }
        for facts in map(torch.cuda.get_device_properties, range(count))
    ]
    return gpus, "" if gpus else "no GPU"


def _has_kernels(capability: tuple[int, int], built_for: list[str]) -> bool:
    """Return whether torch has kernels for a card: binaries of its major version, or older PTX."""
    for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(built_for)):
        version = divmod(int(digits), 10)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return not built_for


def probe_plugins() -> None:
    """Load each installed plugin; report its package, and its problem or an empty text."""
    from ssdctl.config.fields import device_type
    from ssdctl.data import formats
    from ssdctl.input import augmentations
    from ssdctl.launch.base import load_engine
    from ssdctl.model.backbones import find_backbone
    from ssdctl.runtime import plugins
    from ssdctl.training.observers.trackers import find_tracker

    load: dict[plugins.PluginKind, Callable[[str], object]] = {
        plugins.BACKBONES: find_backbone,
        plugins.FORMATS: formats.load,
        plugins.AUGMENTATIONS: augmentations.load_one,
        plugins.LAUNCHERS: load_engine,
        plugins.TRACKERS: find_tracker,
        plugins.DEVICES: device_type,
    }
    for kind in plugins.KINDS:
        for plugin in plugins.plugins(kind):
            report(**{str(plugin): "it ends the process"})
            try:
                load[kind](plugin.name)
                problem = ""
            except SsdctlError as error:
                problem = error.message.removeprefix(f"{plugin}: ")
            report(**{str(plugin): problem})


def probe_disk(folder: str) -> None:
    """Measure the rates of writing and reading a file in a folder, in bytes/s.

    The file has no name, so nothing remains even if the process is killed.
    """
    noise = os.urandom(BLOCK)  # cannot be compressed by the file system
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.perf_counter(), 0
        while written < SIZE and time.perf_counter() - start < DEADLINE_S:
            written += file.write(noise)
        os.fsync(file.fileno())
        report(write=written / (time.perf_counter() - start))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
        file.seek(0)
        start, got = time.perf_counter(), 0
        while (block := file.read(BLOCK)) and time.perf_counter() - start < DEADLINE_S:
            got += len(block)
        report(read=got / (time.perf_counter() - start))


def probe_ranks() -> None:
    """Average a tensor with the other ranks over gloo, as training does."""
    import torch

    from ssdctl.device.cpu import Cpu
    from ssdctl.distributed.collectives import average, barrier, process_group
    from ssdctl.distributed.ranks import find_ranks

    ranks = find_ranks()
    with process_group(ranks, Cpu(), TIMEOUT_S):
        values = torch.full((NUMBERS,), float(ranks.rank + 1))
        average(values, ranks)  # the first call opens the connections
        start = time.perf_counter()
        mean = average(values, ranks)
        spent_s = time.perf_counter() - start
        barrier(ranks)
    expected = (ranks.world_size + 1) / 2
    if not bool((mean == expected).all()):
        sys.exit(f"the mean is {mean[0].item()}, not {expected}")
    report(all_reduce_s=spent_s, bytes=4 * NUMBERS)


def probe_step() -> None:
    """Run steps of a small network on noise; the config and its sources are JSON on stdin."""
    import msgspec
    import torch

    from ssdctl.config import Config
    from ssdctl.data.coco_json import COCO_NUM_IMAGES
    from ssdctl.data.open_dataset import DatasetSize
    from ssdctl.device import open_device
    from ssdctl.distributed.ranks import SINGLE_PROCESS
    from ssdctl.input.fake import random_batch
    from ssdctl.model.ssd300 import SSD300
    from ssdctl.training.optimizer import without_dynamo
    from ssdctl.training.plan import make_plan
    from ssdctl.training.step import build_step

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    start = time.perf_counter()
    device = open_device(config.train.device, 0, config.train.execution)
    size = DatasetSize(COCO_NUM_IMAGES, None, 0, [])
    plan = make_plan(config, device, SINGLE_PROCESS, size, largest_batch=BATCH_SIZE)
    how = {"precision": plan.precision, "execution": device.execution}
    report(device=device.name, label=device.label, **how)
    torch.manual_seed(0)
    with without_dynamo():
        model = device.place(SSD300("resnet18", STEP_CLASSES)).train()
        step = build_step(model, config.train, device, plan.precision)
        batch = random_batch(BATCH_SIZE, STEP_CLASSES)
        before = [p.detach().clone() for p in model.parameters()]
        loss = step([batch], LR).read(SINGLE_PROCESS)["loss"]
        device.synchronize()
        first_s = time.perf_counter() - start
        if not math.isfinite(loss):
            sys.exit(f"the loss is {loss}")
        if all(map(torch.equal, before, model.parameters())):
            sys.exit("no weight changed")
        start = time.perf_counter()
        step([batch], LR)
        device.synchronize()
    report(loss=loss, first_s=first_s, step_s=time.perf_counter() - start)


class Card(NamedTuple):
    """The place and the rate of a rank."""

    host: str
    local_rank: int
    label: str
    flops: float  # per second, in a matrix product


def check_collectives(config: Config) -> list[Check]:
    """Measure a matrix product on each card and all-reduces of the gradient's size.

    Collective: every rank must call it.

    Returns:
        The results on the first rank; an empty list on the others.
    """
    from ssdctl.benchmark.train import matmul_flops
    from ssdctl.device import open_device
    from ssdctl.distributed.collectives import gather_to_first, process_group
    from ssdctl.distributed.ranks import find_ranks

    ranks = find_ranks()
    device = open_device(config.train.device, ranks.local_rank, config.train.execution)
    with process_group(ranks, device, COLLECTIVES_S):
        flops = matmul_flops(device, "bf16" if device.auto_precision == "bf16" else "fp32")
        card = Card(socket.gethostname(), ranks.local_rank, device.label, flops)
        num_bytes, seconds = 0, 0.0
        if not ranks.is_single_process:
            num_bytes, seconds = _all_reduce(config, device, ranks)
        cards = gather_to_first(card, ranks)
    return [_cards(cards), _network(num_bytes, seconds, cards)] if ranks.is_main else []


def _all_reduce(config: Config, device: Device, ranks: Ranks) -> tuple[int, float]:
    """Return the bytes of the network's gradient, and the seconds of their fastest all-reduce."""
    import torch

    from ssdctl.benchmark.train import fastest_s
    from ssdctl.distributed.collectives import barrier
    from ssdctl.model.ssd300 import SSD300

    with torch.device("meta"):
        network = SSD300(config.model.backbone, COCO_OUTPUTS)
    numbers = sum(p.numel() for p in network.parameters())
    gradient = torch.zeros(numbers).to(device.torch_device)

    def average() -> None:
        device.sum_over_ranks([gradient])

    # The first one opens the connections.
    return 4 * numbers, fastest_s(average, device, REPEATS, before=lambda: barrier(ranks))


def _cards(cards: list[Card]) -> Check:
    rates = [card.flops for card in cards]
    slowest = rates.index(min(rates))
    card = cards[slowest]
    detail = (
        f"{len(cards)} x {card.label}: {min(rates) / 1e12:.2f} to {max(rates) / 1e12:.2f} TFLOP/s; "
        f"slowest is rank {slowest} (device {card.local_rank} of {card.host})"
    )
    remedy = f"the others wait for it in each step: check its clocks, cores and load on {card.host}"
    return result("matrix product", detail, remedy if min(rates) < SLOW * max(rates) else None)


def _network(num_bytes: int, seconds: float, cards: list[Card]) -> Check:
    count = len(cards)
    if count == 1:
        remedy = "`ssdctl launch --gpus 2 -- doctor --collectives` measures several devices"
        return Check("all-reduce", OK, "a single process has no network to test", remedy)
    hosts = len({card.host for card in cards})
    # The bytes that each rank sends and receives, as NVIDIA's nccl-tests count them.
    rate = 2 * (count - 1) / count * num_bytes / seconds
    detail = f"{num_bytes / 1e6:.0f} MB over {count} ranks on {hosts} host(s): "
    return result("all-reduce", f"{detail}{1000 * seconds:.1f} ms, {rate / 1e9:.2f} GB/s per rank")


if __name__ == "__main__":
    try:
        globals()[f"probe_{sys.argv[1]}"](*sys.argv[2:])
    except SsdctlError as error:
        sys.exit(f"{error}" + (f" ({error.hint})" if error.hint else ""))
    except OSError as problem:
        sys.exit(f"{problem.strerror or problem}")
