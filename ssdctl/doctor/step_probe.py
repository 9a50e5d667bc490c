"""Run training steps of a small network on noise, with the config's device and optimizer.

The config and its sources are read from stdin, as JSON.
"""

from __future__ import annotations

import math
import sys
import time

import msgspec
import torch

from ssdctl.config import Resolved
from ssdctl.data.dataset import COCO_NUM_IMAGES
from ssdctl.device import open_device
from ssdctl.distributed.ranks import SINGLE_PROCESS
from ssdctl.doctor.subprocess_probe import report
from ssdctl.errors import SsdctlError
from ssdctl.model.ssd300 import Architecture
from ssdctl.training.light_optimizer import without_dynamo
from ssdctl.training.loss_scale import loss_scale
from ssdctl.training.memory import random_batch
from ssdctl.training.optimizer import build_optimizer
from ssdctl.training.run import finalize
from ssdctl.training.step import TrainStep

NETWORK = Architecture("resnet18", "none", num_classes=21)
BATCH_SIZE = 1  # a step on two cores takes a second or two
LR = 1e-4


def main() -> None:
    resolved = msgspec.json.decode(sys.stdin.buffer.read(), type=Resolved)
    config = resolved.config.train
    start = time.perf_counter()
    device = open_device(config.device, 0, config.execution)
    run = finalize(
        resolved, device, SINGLE_PROCESS, COCO_NUM_IMAGES, largest_batch=lambda _: BATCH_SIZE
    )
    precision = run.precision
    report(
        device=device.name,
        label=device.label,
        precision=precision,
        execution=device.execution,
    )
    torch.manual_seed(0)
    model = device.place(NETWORK.build()).train()
    optimizer = build_optimizer(model, config, device)
    step = TrainStep(
        model, optimizer, device, config, precision, scale=loss_scale(precision, device, optimizer)
    )
    batch = random_batch(BATCH_SIZE, NETWORK.num_classes)
    before = [p.detach().clone() for p in model.parameters()]
    loss = step([batch], LR).read(SINGLE_PROCESS)["loss"]
    device.synchronize()
    first_s = time.perf_counter() - start
    if not math.isfinite(loss):
        sys.exit(f"the loss is {loss}")
    if all(bool((old == new).all()) for old, new in zip(before, model.parameters(), strict=True)):
        sys.exit("no weight changed")
    start = time.perf_counter()
    step([batch], LR)
    device.synchronize()
    report(loss=loss, first_s=first_s, step_s=time.perf_counter() - start)


if __name__ == "__main__":
    try:
        with without_dynamo():
            main()
    except SsdctlError as error:
        sys.exit(f"{error}" + (f" ({error.hint})" if error.hint else ""))
