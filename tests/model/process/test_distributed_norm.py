"""Batch norm over two ranks against one rank with the joined batch."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import run_ranks
from torch import Tensor, nn

from ssdctl.device import inductor
from ssdctl.model.distributed_norm import convert_batch_norms

SCRIPT = """
import json, os, sys
from torch import distributed as dist
sys.path.insert(0, sys.argv[1])
import test_distributed_norm as test
from ssdctl.model.distributed_norm import convert_batch_norms

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
model = test.network()
convert_batch_norms(model, 2)
if sys.argv[2] == "compile":
    model.compile(fullgraph=True, dynamic=False)
results = test.train(model, test.images()[rank::2], ranks=2)
if rank == 0:
    print(json.dumps(results))
dist.destroy_process_group()
"""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1),
        nn.BatchNorm2d(2),
    ).double()  # fmt: skip


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 5 + 2 * torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)


def train(model: nn.Module, batch: Tensor, *, ranks: int = 1) -> dict[str, list[float]]:
    """Take two steps of SGD with gradients averaged over the ranks; return the state after them."""
    for _ in range(2):
        loss = model(batch).sigmoid().square().mean()
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if ranks > 1:
                torch.distributed.all_reduce(parameter.grad)
            with torch.no_grad():
                parameter -= 0.5 * parameter.grad / ranks
    return {name: value.flatten().tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("execution", ["eager", pytest.param("compile", marks=pytest.mark.slow)])
def test_two_ranks_equal_one_with_the_joined_batch(execution: str) -> None:
    ranks = run_ranks(2, SCRIPT, Path(__file__).parent, execution)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    results = json.loads(ranks[0].out.splitlines()[-1])
    expected = train(network(), images())
    separate = train(network(), images()[::2])
    assert list(results) == list(expected)
    for name, values in expected.items():
        assert results[name] == pytest.approx(values, abs=1e-10), name
    assert separate["1.running_mean"] != pytest.approx(expected["1.running_mean"], abs=1e-4)


@pytest.mark.parametrize("can_leave_out", [False, True])
def test_no_cuda_graph_has_statistics(monkeypatch: pytest.MonkeyPatch, can_leave_out: bool) -> None:
    tag = SimpleNamespace(cudagraph_unsafe=1) if can_leave_out else SimpleNamespace()
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert inductor.gpu_options(model)["triton.cudagraphs"]  # it has imported the compiler
    monkeypatch.setattr(torch, "Tag", tag)
    assert inductor.gpu_options(model)["triton.cudagraphs"]
    convert_batch_norms(model, world_size=2)
    assert inductor.gpu_options(model)["triton.cudagraphs"] == can_leave_out
