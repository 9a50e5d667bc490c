"""Measure training: rate, step time, fraction of the peak, memory, duration of a run.

The step is the one of `ssdctl train`. With fake data the same batch is used for each step, which
measures only the device; with real data the input runs in parallel, which shows its cost.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ssdctl.benchmark.data import Measurements, endless_batches
from ssdctl.checkpoint.format import Architecture
from ssdctl.config import Config, TrainConfig
from ssdctl.data.coco_json import COCO_NUM_CLASSES, COCO_NUM_IMAGES
from ssdctl.data.open_dataset import DatasetSize
from ssdctl.data.store import Split
from ssdctl.device import Device, opened_device
from ssdctl.distributed import SINGLE_PROCESS, Ranks, collectives, find_ranks
from ssdctl.distributed.process_group import process_group
from ssdctl.input.batch import Batch
from ssdctl.input.open import copy_ahead, random_batch
from ssdctl.model.ssd300 import network_of
from ssdctl.runtime.system import usable_cores
from ssdctl.training.memory import architecture_of, out_of_memory_hints, plan_on_device
from ssdctl.training.optimizer import without_dynamo
from ssdctl.training.plan import Plan
from ssdctl.training.setup import frozen_network
from ssdctl.training.step import TrainStep, build_step

log = logging.getLogger(__name__)
COCO_OUTPUTS = COCO_NUM_CLASSES + 1
CHANNELS, SIDE = 256, 38  # of SSD300's largest map: the convolution that shows the peak
# Sides of the matrices, and images of the convolution, on the host and on an accelerator.
HOST_SIZES, ACCELERATOR_SIZES = (2048, 8), (8192, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARMUP_STEPS = 3
CHECK_EVERY = 10  # steps
FEWEST_STEPS, MOST_STEPS, MEASURED_S = 3, 8, 5.0  # of `seconds_per_step`; the first allocates


def benchmark_train(split: Split | None, config: Config, seconds: float) -> Measurements | None:
    """Measure optimizer steps of a run as long as one on COCO, each kind for some seconds.

    Args:
        split: Real images; None measures only with fake data.

    Returns:
        The metrics on the first rank, None on the others.
    """
    ranks, train = find_ranks(), config.train
    with (
        opened_device(train.device, ranks, train.execution, tf32=train.tf32) as device,
        process_group(ranks, device) as ranks,
        without_dynamo(),
    ):
        for notice in device.notices:
            log.info(notice)
        size = DatasetSize(COCO_NUM_IMAGES, None, 0, [])
        outputs = max(COCO_OUTPUTS, len(split.classes) + 1 if split is not None else 0)
        plan = plan_on_device(config, device, ranks, size, outputs)
        architecture = architecture_of(plan.config, outputs)
        bench = _Bench(plan, architecture, device, ranks)
        with out_of_memory_hints(plan, architecture, device):
            metrics = bench.metrics(split, seconds)
        return metrics if ranks.is_main else None


def seconds_per_step(
    architecture: Architecture, config: TrainConfig, device: Device, precision: str, batch_size: int
) -> float:
    """Measure a few steps on random images, for a first estimate of a run's duration."""
    model = device.place(frozen_network(architecture, config)).train()
    batch = random_batch(batch_size, architecture.num_classes, max_boxes=12)
    times: list[float] = []
    with without_dynamo():
        step = build_step(model, config, device, precision)
        while len(times) < FEWEST_STEPS or (len(times) < MOST_STEPS and sum(times) < MEASURED_S):
            start = time.perf_counter()
            step([batch], 1e-6)
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


class _Bench:
    def __init__(
        self, plan: Plan, architecture: Architecture, device: Device, ranks: Ranks
    ) -> None:
        self.config, self.architecture, self.device = plan.config, architecture, device
        self.ranks, self.precision, self.size = ranks, plan.precision, plan.batch_size
        self.model = device.place(frozen_network(architecture, plan.config.train)).train()

    def metrics(self, split: Split | None, seconds: float) -> Measurements:
        fake = itertools.repeat(self._fake_batch(split))
        step, compile_s = self._warm_step(self.ranks, fake)
        fake_rate = rate = self._rate(step, fake, seconds)
        extra = {}
        if split is not None:
            threads = self.config.train.workers or usable_cores(self.ranks.world_size)
            real = endless_batches(split, self.config, self.size, threads, self.device)
            rate = self._rate(step, real, seconds)
            extra["images_per_second_fake"] = round(fake_rate, 3)
            extra["input_cost"] = round(1 - rate / fake_rate, 4)
        memory = self.device.peak_memory_bytes()
        if not self.ranks.is_single_process:
            single_step, _ = self._warm_step(SINGLE_PROCESS, fake)
            single = self._rate(single_step, fake, seconds)
            extra["scaling_efficiency"] = round(fake_rate / single / self.ranks.world_size, 4)
        flops = train_flops(self.architecture)
        achieved = flops * rate / self.ranks.world_size
        peak = peak_flops(self.device, self.precision)
        hours = COCO_NUM_IMAGES / rate / 3600
        return {
            "images_per_second": round(rate, 3),
            "step_ms": round(1000 * self.size * self.ranks.world_size / rate, 2),
            "tflops": round(achieved / 1e12, 4),
            "peak_fraction": round(achieved / peak, 4),
            "peak_tflops": round(peak / 1e12, 4),
            "gflop_per_image": round(flops / 1e9, 1),
            "device": self.device.label,
            "world_size": self.ranks.world_size,
            "precision": self.precision,
            "execution": self.device.execution,
            "backbone": self.architecture.backbone,
            "batch_size": self.size,
            "data": "fake" if split is None else "real",
            "coco_epoch_hours": round(hours, 3),
            "coco_recipe_hours": round(hours * self.config.train.epochs, 1),
            **extra,
            "warmup_s": round(compile_s, 1),
            "peak_memory_bytes": memory,
        }

    def _fake_batch(self, split: Split | None) -> Batch:
        if split is None:
            return random_batch(self.size, COCO_OUTPUTS, 93)
        # Labels of the dataset's classes; the network has COCO's outputs, or more.
        return random_batch(self.size, len(split.classes) + 1, max(split.most_boxes, 1))

    def _warm_step(self, ranks: Ranks, batches: Iterator[Batch]) -> tuple[TrainStep, float]:
        """Return a compiled step, and the seconds that compiling took."""
        config = self.config.train
        step = build_step(self.model, config, self.device, self.precision, ranks)
        start = time.perf_counter()
        for batch in itertools.islice(copy_ahead(batches, self.device), WARMUP_STEPS):
            step([batch], 1e-6)
        self.device.synchronize()
        spent = time.perf_counter() - start
        self.device.release_memory()  # used by compiling and by the search for kernels
        return step, spent

    def _rate(self, step: TrainStep, batches: Iterator[Batch], seconds: float) -> float:
        ahead = copy_ahead(batches, self.device)
        for batch in itertools.islice(ahead, WARMUP_STEPS):
            step([batch], 1e-6)
        steps, spent = timed(
            lambda: step([next(ahead)], 1e-6),
            seconds,
            wait=self.device.synchronize,
            drain=not self.device.bounds_queue,
            is_any=lambda flag: collectives.any_rank([flag], self.ranks)[0],
        )
        return self.size * steps * self.ranks.world_size / spent


def timed(
    work: Callable[[], object],
    seconds: float,
    *,
    wait: Callable[[], None],
    is_any: Callable[[bool], bool],
    drain: bool = True,
) -> tuple[int, float]:
    """Repeat work until the seconds are over on any rank.

    Args:
        wait: Waits until the submitted work is done.
        drain: Wait at every check of the time, so that the host does not run far ahead of the
            device. Otherwise only after the first and the last repetition: each wait leaves the
            device without work until the host has submitted more.
        is_any: Returns whether the flag is true on any rank. Collective: every rank must make the
            same number of calls.

    Returns:
        The number of repetitions, equal on all ranks, and the seconds.
    """
    wait()
    is_any(False)  # all start together
    times, check_every, is_over, start = 0, 1, False, time.perf_counter()
    while not is_over:
        work()
        times += 1
        if times % check_every == 0:
            if drain or times == 1:
                wait()
            spent = time.perf_counter() - start
            is_over = is_any(spent >= seconds)
            # Fast work is checked every few repetitions, slow work each time. All ranks must decide
            # this together: after different decisions they would wait for each other forever.
            if times == 1 and not is_any(spent > seconds / CHECK_EVERY):
                check_every = CHECK_EVERY
    wait()
    return times, time.perf_counter() - start


def train_flops(architecture: Architecture) -> float:
    """Return the FLOP of forward and backward on one image, counted from the shapes.

    Batch norm cannot train on the 1 x 1 map of one image, so two are counted.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        network = network_of(architecture, device="meta")
        offsets, logits = network(torch.zeros(2, 3, 300, 300))
        (offsets.sum() + logits.sum()).backward()
    return counter.get_total_flops() / 2


def peak_flops(device: Device, precision: str) -> float:
    """Return the practical peak in FLOP/s: of a large matrix product or convolution, the faster."""
    place, dtype = device.torch_device, DTYPES[precision]
    size, batch = HOST_SIZES if device.is_host else ACCELERATOR_SIZES
    a = torch.randn(size, size, device=place).to(dtype)
    layout = torch.channels_last
    x, w = (
        torch.randn(shape, device=place).to(dtype).contiguous(memory_format=layout)
        for shape in ((batch, CHANNELS, SIDE, SIDE), (CHANNELS, CHANNELS, 3, 3))
    )
    convolution = 2 * batch * SIDE**2 * CHANNELS**2 * 9
    return max(
        2 * size**3 / _fastest_s(lambda: a @ a, device),
        convolution / _fastest_s(lambda: nn.functional.conv2d(x, w, padding=1), device),
    )


def _fastest_s(work: Callable[[], Tensor], device: Device) -> float:
    fastest = float("inf")
    for _ in range(6):
        device.synchronize()
        start = time.perf_counter()
        result = work()  # kept: a lazy device computes what is still referenced
        device.mark_step()
        device.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
        del result
    return fastest
