"""CUDA graphs need static inputs: each tensor that a compiled step changes must be one, with one
rank and with several. Traced on the CPU by a backend that runs the graphs as they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_ranks
from tiny_network import batch, build_training

from ssdctl.device import inductor
from ssdctl.device.cpu import Cpu
from ssdctl.distributed import Ranks

SCRIPT = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import test_static_inputs as test
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed import find_ranks

device, ranks = test.TracedCpu(), find_ranks()
with process_group(ranks, device, 60):
    test.take_step(device, ranks, overlap_gradients=sys.argv[2] == "overlap")
print(json.dumps(device.graphs))
"""


class TracedCpu(Cpu):
    """Runs compiled steps by their traced graphs; `graphs` lists the forward graphs.

    Each is [inputs, changed inputs, changed inputs that are not static].
    """

    execution = "compile"

    def __init__(self) -> None:
        super().__init__("compile")
        self.ddp_bucket_mb = 0.0001  # type: ignore[assignment]  # several buckets
        torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # the compiler's bound
        self.graphs: list[list[int]] = []

    def compile(self, module: torch.nn.Module, *, overlap: bool = False) -> None:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def record(graph: torch.fx.GraphModule, inputs: object) -> Any:
            context = torch._guards.TracingContext.try_get()
            infos = context.fw_metadata.input_info
            static = set(context.fw_metadata.static_input_indices or ())
            changed = [n for n, info in enumerate(infos) if info.mutates_data]
            row = [len(infos), len(changed), sum(n not in static for n in changed)]
            self.graphs.append(row)
            return make_boxed_func(graph.forward)

        def backward(graph: torch.fx.GraphModule, inputs: object) -> Any:
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=record, bw_compiler=backward)
        inductor.compile_in_place(module, self.blocks, overlap=overlap, backend=backend)


def take_step(device: TracedCpu, ranks: Ranks, *, overlap_gradients: bool) -> None:
    _, _, step = build_training(device, ranks=ranks, overlap_gradients=overlap_gradients)
    step([batch()], 1e-3)


@pytest.mark.parametrize(("count", "graphs"), [(1, "one"), (2, "one"), (2, "overlap")])
def test_every_input_that_a_step_changes_is_static(count: int, graphs: str) -> None:
    """Overlapping gradients split the step."""
    ranks = run_ranks(count, SCRIPT, Path(__file__).parent, graphs)
    assert [rank.code for rank in ranks] == [0] * count, ranks
    for rank in ranks:
        recorded = json.loads(rank.out.splitlines()[-1])
        assert (len(recorded) == 1) == (graphs == "one")
        if graphs == "one":
            ((_, changed, not_static),) = recorded
            assert changed >= 2
            assert not_static == 0
