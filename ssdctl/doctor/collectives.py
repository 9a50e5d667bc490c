"""Check the cards of all ranks and the network between them: a health check before a long run.

Every rank of `ssdctl launch ... -- doctor --collectives` calls it. torch is imported here: the job
would not start without it either.
"""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

import torch

from ssdctl.benchmark.train import matmul_flops
from ssdctl.config import Config
from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.distributed.collectives import barrier, gather_to_first
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed.ranks import Ranks, find_ranks
from ssdctl.doctor.check import Check, bad, ok
from ssdctl.model.ssd300 import Architecture

NUM_CLASSES = 81  # COCO's
REPEATS = 5
SLOW = 0.8  # of the fastest card's rate
TIMEOUT_S = 300.0


class Card(NamedTuple):
    """A rank's place and rate."""

    host: str
    local_rank: int
    label: str
    flops: float  # of a matrix product, per second


def check_collectives(config: Config) -> list[Check]:
    """Measure a matrix product on each card and all-reduces of the gradient's size.

    Collective: every rank must call it.

    Returns:
        The results on the first rank; an empty list on the others.
    """
    ranks = find_ranks()
    device = open_device(config.train.device, ranks.local_rank, config.train.execution)
    with process_group(ranks, device, TIMEOUT_S):
        flops = matmul_flops(device, "bf16" if device.has_native_bf16 else "fp32")
        card = Card(socket.gethostname(), ranks.local_rank, device.label, flops)
        num_bytes, seconds = 0, 0.0
        if not ranks.is_single_process:
            num_bytes, seconds = _all_reduce(config, device, ranks)
        cards = gather_to_first(card, ranks)
    return [_cards(cards), _network(num_bytes, seconds, cards)] if ranks.is_main else []


def _all_reduce(config: Config, device: Device, ranks: Ranks) -> tuple[int, float]:
    """Return the bytes of the network's gradient, and the seconds of their fastest all-reduce."""
    with torch.device("meta"):
        network = Architecture(config.model.backbone, "none", num_classes=NUM_CLASSES).build()
    numbers = sum(p.numel() for p in network.parameters())
    gradient = torch.zeros(numbers).to(device.torch_device)
    fastest = float("inf")
    for _ in range(REPEATS):  # the first one opens the connections
        device.synchronize()
        barrier(ranks)
        start = time.perf_counter()
        device.sum_over_ranks([gradient])
        device.mark_step()
        device.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return 4 * numbers, fastest


def _cards(cards: list[Card]) -> Check:
    rates = [card.flops for card in cards]
    slowest = min(range(len(cards)), key=rates.__getitem__)
    card = cards[slowest]
    detail = (
        f"{len(cards)} x {card.label}: {min(rates) / 1e12:.2f} to {max(rates) / 1e12:.2f} TFLOP/s"
    )
    detail += f"; slowest is rank {slowest} (device {card.local_rank} of {card.host})"
    if min(rates) < SLOW * max(rates):
        remedy = (
            f"the others wait for it in each step: check its clocks, cores and load on {card.host}"
        )
        return bad("matrix product", detail, remedy)
    return ok("matrix product", detail)


def _network(num_bytes: int, seconds: float, cards: list[Card]) -> Check:
    count = len(cards)
    if count == 1:
        remedy = "ssdctl launch --gpus N -- doctor --collectives measures several devices"
        return ok("all-reduce", "a single process has no network to test", remedy)
    hosts = len({card.host for card in cards})
    # The bytes that each rank sends and receives, as NVIDIA's nccl-tests count them.
    rate = 2 * (count - 1) / count * num_bytes / seconds
    detail = f"{num_bytes / 1e6:.0f} MB over {count} ranks on {hosts} host(s): "
    return ok("all-reduce", f"{detail}{1000 * seconds:.1f} ms, {rate / 1e9:.2f} GB/s per rank")
