"""Measure the input of this machine: images per second of the host stage and the full chain.

    metrics = benchmark_data(split, config, seconds=5)

Host stage: read, crop, decode, resize, boxes: all that the CPU does in training. Full chain: also
colors, normalization and targets, which the device computes in training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ssdctl.config import Config
from ssdctl.data.store import Split
from ssdctl.device import Device, inductor, open_device
from ssdctl.input.batch import Batch, LoaderConfig, trim_padding
from ssdctl.input.normalize import Normalize
from ssdctl.input.open import open_input
from ssdctl.model import fused
from ssdctl.model.backbones import RESNET
from ssdctl.model.loss import Targets
from ssdctl.runtime.system import usable_cores

log = logging.getLogger(__name__)
Measurements = dict[str, float | int | str]
BATCH_SIZE = 32
WARMUP_BATCHES = 4
CHUNK = 8  # images per task of the full chain's last stages


def benchmark_data(split: Split, config: Config, seconds: float) -> Measurements:
    """Return images per second of the host stage and the full chain."""
    device = open_device("cpu", execution=config.train.execution)
    for notice in device.notices:
        log.info(notice)
    threads = config.train.workers or usable_cores()

    def batches() -> Iterator[Batch]:
        return endless_batches(split, config, BATCH_SIZE, threads, device)

    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the full chain computes in the counted threads
    try:
        host = _rate((len(batch.rows) for batch in batches()), seconds)
        full = _rate(full_chain(batches(), threads, device), seconds)
    finally:
        torch.set_num_threads(torch_threads)
    return {
        "images_per_second": host,
        "images_per_second_full": full,
        "workers": threads,
        "execution": device.execution,
        "pipeline": config.train.pipeline,
    }


def endless_batches(
    split: Split, config: Config, batch_size: int, threads: int, device: Device
) -> Iterator[Batch]:
    """Return training batches of one rank from the config's pipeline."""
    loader_config = LoaderConfig.of(config.train, split, batch_size=batch_size, threads=threads)
    decoder, buffer = device.decoder, device.host_buffer
    source = open_input(config.train.pipeline, split, loader_config, decoder=decoder, buffer=buffer)
    return source.batches(0, 1 << 40)


def full_chain(batches: Iterator[Batch], threads: int, device: Device) -> Iterator[int]:
    """Color, normalize and match batches on the CPU; yield the number of images of each."""
    last_stages = _LastStages()
    if device.execution == "compile":
        fused.swap_in(last_stages, device.forms)
        # The number of boxes varies; only a C++ wrapper releases the GIL for the other threads.
        options = {"cpp_wrapper": True}
        inductor.compile_in_place(last_stages, device.blocks, dynamic=None, options=options)

    def finish(batch: Batch, chunk: slice) -> None:
        images, boxes, labels = batch.images[chunk], batch.boxes[chunk], batch.labels[chunk]
        jitter = None if batch.jitter is None else batch.jitter[chunk]
        piece = trim_padding(batch._replace(boxes=boxes, labels=labels))
        if device.execution == "compile":
            for tensor in (piece.boxes, piece.labels):
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        last_stages(images, jitter, piece.boxes, piece.labels)

    with ThreadPoolExecutor(threads) as pool:
        for batch in batches:
            size = len(batch.rows)
            chunks = [slice(start, start + CHUNK) for start in range(0, size, CHUNK)]
            list(pool.map(lambda chunk, batch=batch: finish(batch, chunk), chunks))
            yield size


class _LastStages(nn.Module):
    """Prepare a batch for the network and its loss, as the device does in training."""

    def __init__(self) -> None:
        super().__init__()
        self.normalize = Normalize(RESNET.mean, RESNET.std)
        self.targets = Targets()

    def forward(
        self, images: Tensor, jitter: Tensor | None, boxes: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.normalize(images, jitter), self.targets(boxes, labels)


def _rate(counts: Iterator[int], seconds: float) -> float:
    for _ in range(WARMUP_BATCHES):
        next(counts)
    images, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        images += next(counts)
    return round(images / (time.perf_counter() - start), 1)
