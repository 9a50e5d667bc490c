"""Programs of the doctor that may hang or crash: `-m ssdctl.doctor.probes NAME` runs probe_NAME.

Each prints facts as lines of JSON; those printed before a crash are still used.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from typing import TYPE_CHECKING, Any

from ssdctl.doctor import FACT
from ssdctl.errors import SsdctlError
from ssdctl.files import msgspec_type

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = 2**20  # 4 MB, about a layer's gradients
TIMEOUT_S = 60.0
BATCH_SIZE = 1  # a step on two cores takes a second or two
LR = 1e-4
STEP_CLASSES = 21  # with background


def report(**facts: object) -> None:
    sys.stdout.write(f"{FACT}{json.dumps(facts)}\n")
    sys.stdout.flush()


def probe_torch() -> None:
    """Report the version of torch and the devices that it detects."""
    start = time.perf_counter()
    import torch

    report(torch=torch.__version__, import_s=time.perf_counter() - start)
    import torch.distributed as dist

    report(has_gloo=dist.is_available() and dist.is_gloo_available())
    from ssdctl.device.cpu import Cpu

    cpu = Cpu()
    report(cpu={"label": cpu.label, "has_native_bf16": cpu.auto_precision == "bf16"})
    report(cuda_build=torch.version.cuda)
    gpus, problem = _gpus()
    report(gpus=gpus, gpu_problem=problem)


def _gpus() -> tuple[list[dict[str, Any]], str]:
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


def probe_plugin(group: str, name: str) -> None:
    """Load an installed plugin; report its problem, or an empty text."""
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
    (function,) = (function for kind, function in load.items() if kind.group == group)
    try:
        function(name)
    except SsdctlError as error:
        report(problem=error.message)
    else:
        report(problem="")


def probe_ranks() -> None:
    """Average a tensor with the other ranks over gloo, as training does."""
    import torch

    from ssdctl.device.cpu import Cpu
    from ssdctl.distributed import find_ranks
    from ssdctl.distributed.collectives import average, barrier
    from ssdctl.distributed.process_group import process_group

    with process_group(find_ranks(), Cpu(), TIMEOUT_S) as ranks:
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
    from ssdctl.distributed import SINGLE_PROCESS
    from ssdctl.input.open import random_batch
    from ssdctl.model.ssd300 import SSD300
    from ssdctl.training.optimizer import without_dynamo
    from ssdctl.training.plan import make_plan
    from ssdctl.training.step import build_step

    config = msgspec.json.decode(sys.stdin.buffer.read(), type=msgspec_type(Config))
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


if __name__ == "__main__":
    try:
        globals()[f"probe_{sys.argv[1]}"](*sys.argv[2:])
    except SsdctlError as error:
        sys.exit(f"{error}" + (f" ({error.hint})" if error.hint else ""))
    except OSError as problem:
        sys.exit(f"{problem.strerror or problem}")
