"""Operations and compilations of the training step on XLA, counted on torch_xla's CPU client.

    PJRT_DEVICE=CPU python benchmarks/xla.py [--backbone resnet34] [--bs 2] [--against COMMIT]

torch_xla writes the graph of each step, whose operations are counted before XLA optimizes
them: gathers, scatters, sorts and all-reduces are slow on a TPU. The step adds up gradients as one
of several ranks does, although it is the only one. `--against` counts another commit, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from startup import ROOT, worktree

STEPS = 3
INSTRUCTION = r"^\s*(?:ROOT )?%?[\w.-]+ = .*? ([\w-]+)\("  # the operation of an HLO instruction
LISTED = ("gather", "scatter", "sort", "all-reduce", "dynamic-slice", "custom-call")


def count_step(backbone: str, batch_size: int, dump: Path) -> dict[str, float]:
    """Run steps in this process; return the counts of the last one.

    Args:
        backbone: Of the network.
        batch_size: Of each step.
        dump: Where torch_xla writes its graphs.
    """
    import torch
    from torch import distributed as dist

    from ssdctl.checkpoint.format import Architecture
    from ssdctl.config import resolve
    from ssdctl.device import open_device
    from ssdctl.distributed import Ranks
    from ssdctl.input.open import random_batch
    from ssdctl.model.ssd300 import network_of
    from ssdctl.training.step import build_step

    device = open_device("xla")
    device.register_backend()
    dist.init_process_group("xla", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    config = resolve(environment={"HOME": "/"}).train
    model = device.place(network_of(Architecture(backbone, "none", 81))).train()
    step = build_step(model, config, device, "bf16", Ranks(0, 2, 0))
    batch = random_batch(batch_size, 81)
    compiled, size = [], 0
    for _ in range(STEPS):
        size = dump.stat().st_size if dump.exists() else 0
        step([batch], 1e-3)
        device.synchronize()
        compiled.append(device.counters()["compiles"])
    graphs = dump.read_text()[size:]
    names = collections.Counter(re.findall(INSTRUCTION, graphs, re.MULTILINE))
    names.subtract({name: names[name] for name in ("parameter", "constant")})
    return {
        "operations": names.total(),
        **{name: names[name] for name in LISTED},
        "graphs_per_step": graphs.count("BEGIN_GRAPH"),
        "compilations": compiled[-1],
        "compilations_after_two_steps": compiled[-1] - compiled[1],
    }


def measure(source: Path, backbone: str, batch_size: int) -> dict[str, float]:
    """Count the step of the package in `source`, in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder, "graphs.0")  # torch_xla appends the device's ordinal
        environment = {
            "PJRT_DEVICE": "CPU",
            **os.environ,
            "PYTHONPATH": str(source),
            "XLA_ALWAYS_ALLREDUCE": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # quicker to compile
            "XLA_SAVE_TENSORS_FILE": str(dump.with_suffix("")),
            "XLA_SAVE_TENSORS_FMT": "hlo",
        }
        command = [sys.executable, __file__, "--backbone", backbone, "--bs", str(batch_size)]
        command += ["--dump", str(dump)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Count and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--bs", type=int, default=2)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.dump:
        print(json.dumps(count_step(options.backbone, options.bs, options.dump)))
        return
    with contextlib.ExitStack() as stack:
        sources = {"now": ROOT}
        if options.against:
            sources = {options.against: stack.enter_context(worktree(options.against)), **sources}
        results = {k: measure(v, options.backbone, options.bs) for k, v in sources.items()}
    if options.json:
        print(json.dumps(results))
        return
    print(f"| | {' | '.join(results)} |\n|---|{'---|' * len(results)}")
    for name in results["now"]:
        print(f"| {name} | {' | '.join(f'{r[name]:g}' for r in results.values())} |")


if __name__ == "__main__":
    main()
