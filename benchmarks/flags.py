"""Host time per step of agreeing on flags (stop, save, end) over many ranks.

    python benchmarks/flags.py --ranks 8 --ranks 64 --ranks 256

The ranks are threads of this process, each with its own gloo group over the loopback interface. A
step is a sleep, in which gloo's threads exchange the flags. "blocking" waits for the exchange at
every step; "one step later" takes the result of the previous step, as the training loop does.
"""

from __future__ import annotations

import datetime
import statistics
import threading
import time
from typing import Annotated

import typer
from torch import distributed as dist

from ssdctl.distributed.collectives import FlagExchange
from ssdctl.distributed.ranks import Ranks

TIMEOUT = datetime.timedelta(seconds=600)
FLAGS = (False, False, False)


def measure(world_size: int, steps: int, step_s: float) -> dict[str, list[float]]:
    """Return the host milliseconds per step of every rank, by method."""
    store = dist.HashStore()
    times: dict[str, list[float]] = {"blocking": [], "one step later": []}
    barrier = threading.Barrier(world_size)

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        flags = FlagExchange(Ranks(rank, world_size, rank), group)
        for name, call in (("blocking", flags.settle), ("one step later", flags.exchange)):
            call(FLAGS)
            barrier.wait()
            for _ in range(steps):
                time.sleep(step_s)
                start = time.perf_counter()
                call(FLAGS)
                times[name].append(1000 * (time.perf_counter() - start))
            barrier.wait()
        flags.settle(FLAGS)
        barrier.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def main(
    ranks: Annotated[list[int], typer.Option(help="Number of ranks; repeatable.")],
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 10,
    step_seconds: Annotated[float, typer.Option(help="Length of a step.")] = 0.3,
) -> None:
    """Print the median and the 90th percentile over ranks and steps."""
    print("ranks  method           median ms   90% ms")
    for world_size in ranks:
        for name, times in measure(world_size, steps, step_seconds).items():
            high = statistics.quantiles(times, n=10)[-1]
            print(f"{world_size:5}  {name:15}  {statistics.median(times):9.3f} {high:8.3f}")


if __name__ == "__main__":
    typer.run(main)
