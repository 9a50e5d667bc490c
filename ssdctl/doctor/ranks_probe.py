"""Run one of two ranks that average a tensor over gloo, in the same way as training runs."""

from __future__ import annotations

import sys
import time

import torch

from ssdctl.device.cpu import Cpu
from ssdctl.distributed.collectives import average, barrier
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed.ranks import find_ranks
from ssdctl.doctor.subprocess_probe import report

NUMBERS = 2**20  # 4 MB, about a layer's gradients
TIMEOUT_S = 60.0


def main() -> None:
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


if __name__ == "__main__":
    main()
