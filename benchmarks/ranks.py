"""Read one store with eight local ranks, without training: throughput and memory.

    python benchmarks/ranks.py [--ranks 8] [--threads 1] [--encoding raw] [--seconds 10]

Each rank is a process of a gloo group with its own share of the sample stream. Reported are images
per second of all ranks together and core milliseconds per image, and for each rank the memory of
its own (anonymous pages) after the first seconds and at the end, and of the store's files: resident
pages, and its share of them (a page that 8 processes map counts as an eighth), as the kernel counts
them in /proc/self/smaps. If the page cache is shared, the shares add up to one copy of the store.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from input import make_dataset
from torch import distributed, multiprocessing

from ssdctl.config import PrepareConfig
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import TrainLoader
from ssdctl.runtime.system import tune_process

BATCH = 32
MB = 1e6


def memory(store: Path) -> dict[str, float]:
    """Return this process's memory in MB: of its own, and of the store's mapped files."""
    usage = {"own": 0.0, "store_resident": 0.0, "store_share": 0.0}
    is_store = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_store = str(store) in line
            continue
        name, _, value = line.partition(":")
        if name == "Anonymous":
            usage["own"] += int(value.split()[0]) * 1024 / MB
        elif is_store and name in ("Rss", "Pss"):
            key = "store_resident" if name == "Rss" else "store_share"
            usage[key] += int(value.split()[0]) * 1024 / MB
    return usage


def serve(rank: int, options: argparse.Namespace, folder: Path) -> None:
    """Load batches of one rank, and let rank 0 print the metrics of all."""
    tune_process()
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(minutes=10),
    )
    split = open_dataset(folder / "data", folder / "store")["train"]
    config = LoaderConfig(
        seed=0,
        batch_size=BATCH,
        threads=options.threads,
        max_boxes=split.most_boxes,
        rank=rank,
        world_size=options.ranks,
    )
    batches = TrainLoader(split, config).batches(0, 1 << 40)
    epoch = -(-len(split.trainable) // (BATCH * options.ranks))
    for _ in range(max(epoch, 4)):  # every rank has read most of the store once
        next(batches)
    early = memory(folder / "store")
    distributed.barrier()
    images, start, busy = 0, time.perf_counter(), time.process_time()
    while (seconds := time.perf_counter() - start) < options.seconds:
        images += len(next(batches).rows)
    result = {
        "images_per_second": images / seconds,
        "core_ms": 1000 * (time.process_time() - busy) / images,
        "early": early,
        "late": memory(folder / "store"),
    }
    results: list[Any] = [None] * options.ranks
    distributed.all_gather_object(results, result)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="decode threads per rank")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--encoding", choices=("jpeg", "raw"), default="raw")
    parser.add_argument("--shrink", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdctl-ranks-") as name:
        folder = Path(name)
        make_dataset(folder / "data", options.images)
        config = PrepareConfig(shrink=options.shrink, encoding=options.encoding)
        prepare(folder / "data", folder / "store", config)
        size = sum(p.stat().st_size for p in (folder / "store").glob("images-*")) / MB
        multiprocessing.spawn(serve, (options, folder), nprocs=options.ranks)
        results = json.loads((folder / "results.json").read_text())
    print(f"{options.ranks} ranks, {options.encoding} store of {size:,.0f} MB")
    print(f"  {sum(r['images_per_second'] for r in results):,.0f} img/s in all, ", end="")
    print(f"{sum(r['core_ms'] for r in results) / len(results):.2f} core ms per image")
    for when in ("early", "late"):
        for key in ("own", "store_resident", "store_share"):
            values = [r[when][key] for r in results]
            print(
                f"  {when}: {key:<15}{min(values):8.0f} to {max(values):6.0f} MB per rank, "
                f"{sum(values):8.0f} MB in all"
            )


if __name__ == "__main__":
    main()
