"""Host time per step of agreeing on flags (stop, save, end) over many ranks.

    TORCH_GLOO_LAZY_INIT=1 python benchmarks/flags.py --ranks 8 --ranks 64 --ranks 256

The ranks are threads of this process, each with its own gloo group over the loopback interface. A
step is a sleep, in which gloo's threads exchange the flags. "blocking" waits for the exchange at
every step; "one step later" takes the result of the previous step, as the training loop does.
With more ranks than cores the wall time of a call is mostly the other ranks' computing. So "in
turn" does the same as "one step later", but the ranks reach the call one after another, spread over
a step: then a rank has a core to itself, as on a cluster.
"""

from __future__ import annotations

import datetime
import statistics
import threading
import time
from typing import Annotated, NamedTuple

import typer
from torch import distributed as dist

from ssdctl.distributed.collectives import FlagExchange
from ssdctl.distributed.process_group import JoinedRanks

TIMEOUT = datetime.timedelta(seconds=600)
FLAGS = (False, False, False)
METHODS = ("blocking", "one step later", "in turn")


class Call(NamedTuple):
    """Host milliseconds of one exchange in one rank."""

    wall: float
    cpu: float  # seconds of the thread that trains


def measure(world_size: int, steps: int, step_s: float) -> dict[str, list[Call]]:
    """Return the calls of every rank and step, by method."""
    store = dist.HashStore()
    calls: dict[str, list[Call]] = {name: [] for name in METHODS}
    barrier = threading.Barrier(world_size)

    def run(rank: int) -> None:
        ranks = JoinedRanks(rank, world_size, rank)  # each thread is a rank
        ranks.host_group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        flags = FlagExchange(ranks)
        for name in METHODS:
            call = flags.settle if name == "blocking" else flags.exchange
            call(FLAGS)
            barrier.wait()
            start = time.perf_counter()
            if name == "in turn":
                start += 0.8 * step_s * rank / world_size
            for step in range(1, steps + 1):
                time.sleep(max(start + step * step_s - time.perf_counter(), 0))
                wall, cpu = time.perf_counter(), time.thread_time()
                call(FLAGS)
                wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
                calls[name].append(Call(1000 * wall, 1000 * cpu))
            barrier.wait()
        flags.settle(FLAGS)
        barrier.wait()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return calls


def main(
    ranks: Annotated[list[int], typer.Option(help="Number of ranks; repeatable.")],
    steps: Annotated[int, typer.Option(help="Measured steps.")] = 10,
    step_seconds: Annotated[float, typer.Option(help="Length of a step.")] = 0.3,
) -> None:
    """Print the median and the 90th percentile over ranks and steps."""
    print("ranks  method           wall: median ms   90% ms   CPU: median ms   90% ms")
    for world_size in ranks:
        for name, calls in measure(world_size, steps, step_seconds).items():
            columns = [
                f"{statistics.median(times):15.3f} {statistics.quantiles(times, n=10)[-1]:8.3f}"
                for times in ([c.wall for c in calls], [c.cpu for c in calls])
            ]
            print(f"{world_size:5}  {name:15}  {'  '.join(columns)}", flush=True)


if __name__ == "__main__":
    typer.run(main)
