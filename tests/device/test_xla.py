"""The lazy path, really run: torch_xla on the CPU. Skipped where torch_xla is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_network import batch, build_training

from ssdctl.device import Device, open_device
from ssdctl.distributed import SINGLE_PROCESS
from ssdctl.errors import NonFiniteError, UsageError
from ssdctl.model.postprocess import refuse_non_finite

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="torch_xla is not installed (extra tpu-xla; .ci/run has an environment with it)",
)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nothing_recompiles_or_synchronizes_between_logs(xla: Device, optimizer: str) -> None:
    """With a warm-up from 0, a bad step, and clipping; then a log point, which pulls once."""
    _, _, step = build_training(xla, optimizer=optimizer, clip_grad=1.0)
    for number in range(2):  # the second has the first's results as inputs: another graph
        result = step([batch(seed=number)], 0.0)  # kept until the next one, as in a training
    before = xla.counters()
    for number in range(5):
        jitter = float("inf") if number == 2 else 1.0
        result = step([batch(seed=number, jitter=jitter)], 1e-4 * number)
    assert xla.counters() == before
    metrics = result.read(SINGLE_PROCESS)
    assert metrics["loss"] > 0
    after = xla.counters()
    assert after["pulls"] == before["pulls"] + 1
    for _ in range(3):
        result = step([batch()], 1e-3)
    assert xla.counters()["compiles"] == after["compiles"]
    assert xla.counters()["pulls"] == after["pulls"]


def test_fp32_is_fp32(xla: Device) -> None:
    """A TPU's own default rounds the factors of products to bf16."""
    from torch_xla import backends

    for tf32, products in ((False, "highest"), (True, "high")):
        with xla.settings(tf32=tf32):
            assert backends.get_mat_mul_precision() == products
        assert backends.get_mat_mul_precision() == "default"
    assert "XLA_NO_SPECIAL_SCALARS" not in os.environ  # read, and restored


def test_outputs_of_any_number_of_classes_are_checked(xla: Device) -> None:
    outputs = [torch.ones(1, count, 9, device=xla.torch_device) for count in (4, 6)]
    refuse_non_finite((outputs[0], outputs[1]))
    outputs[1][0, 5, 8] = float("nan")
    with pytest.raises(NonFiniteError):
        refuse_non_finite((outputs[0], outputs[1]))


def test_a_variable_that_lowers_fp32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with pytest.raises(UsageError, match="XLA_USE_BF16"):
        open_device("xla")


def test_a_rank_takes_one_chip_of_its_node() -> None:
    """As far as the CPU client can show it: there are no chips to share."""
    program = (
        "import os; from ssdctl.device import open_device; open_device('xla', 1);"
        "print(os.environ['PJRT_LOCAL_PROCESS_RANK'], os.environ['PJRT_LOCAL_PROCESS_COUNT'])"
    )
    ranks = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    environment = {**os.environ, **ranks, "PJRT_DEVICE": "CPU"}
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert process.stdout == "1 4\n"
    assert "Setting mat mul precision" not in process.stderr


# One process drives both cores: each batch is split over them.
TWO_CORES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import tiny_network as tiny
import torch_xla
from ssdctl.device import open_device
from ssdctl.input.open import copy_ahead

xla = open_device("xla")
_, _, step = tiny.build_training(xla)
batches = list(copy_ahead((tiny.batch(size=4, seed=n) for n in range(5)), xla))
sharding = torch_xla._XLAC._get_xla_sharding_spec(batches[0].images)
results, counters = [], []
for n, batch in enumerate(batches):
    results.append(step([batch], 1e-3 * n))
    counters.append(xla.counters())
losses = [float(result.losses.total) for result in results]
print(json.dumps([xla.label, sharding, counters[1] == counters[-1], losses]))
"""

# Two replicas in threads of one process: ranks as on TPU v4 and later, as far as the CPU client has
# them. It stops if one program has several reductions, so there is no batch norm.
TWO_REPLICAS = """
import json, sys, threading, time
sys.path.insert(0, sys.argv[1])
import tiny_network as tiny
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
from ssdctl.device.xla import Xla
from ssdctl.distributed import Ranks
from ssdctl.training.step import build_step
import torch

xr.addressable_runtime_device_count = lambda: 1  # as for one rank
lock, both, config = threading.Lock(), threading.Barrier(2), tiny.config()

def train():
    with lock:
        xla = Xla(0)
        rank = xla.torch_device.index
        torch.manual_seed(0)
        model = xla.place(tiny.Tiny(has_norm=False).train())
        step = build_step(model, config, xla, "fp32", Ranks(rank, 2, rank))
    results = []
    for n in range(4):
        batch = tiny.batch(size=4, seed=n, jitter=float("inf") if n == 2 and rank == 1 else 1.0)
        half = batch._replace(**{
            name: getattr(batch, name)[rank::2] for name in ("images", "boxes", "labels", "jitter")
        })
        compiled = xla.counters()["compiles"]
        both.wait()
        # Two compilations of a program at once give two programs, of which the reductions do not
        # find each other: one rank compiles the two graphs of a step, and the other waits for them.
        while n == 0 and rank == 1 and xla.counters()["compiles"] < compiled + 2:
            time.sleep(0.05)
        results.append(step([half], 1e-3))
        xla.synchronize()
    weights = [p.double().sum().item() for p in model.parameters()]
    losses = [r.losses.total.item() for r in results]
    return losses, [r.is_bad.item() for r in results], weights

found = pjrt._run_thread_per_device(0, 1, train, pjrt.initialize_multiprocess)
print(json.dumps([found[0], found[1]]))
"""


def run_script(script: str) -> list[object]:
    """Run a script with two devices of the CPU client; return the list that it prints."""
    process = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parents[1])],
        # In the background, the programs of both devices wait for the same few threads.
        env={
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": "2",
            "PJRT_CPU_ASYNC_CLIENT": "0",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    result: list[object] = json.loads(process.stdout.splitlines()[-1])
    return result


def test_two_cores_of_one_process_share_each_batch() -> None:
    label, sharding, has_no_new_graphs, actual = run_script(TWO_CORES)
    assert label == "XLA CPU, 2 cores"
    assert str(sharding).startswith("{devices=[2,1,1,1]")
    assert has_no_new_graphs
    _, _, step = build_training(open_device("cpu"))
    results = [step([batch(size=4, seed=n)], 1e-3 * n) for n in range(5)]
    assert actual == pytest.approx([float(r.losses.total) for r in results], rel=1e-4)


def test_two_replicas_equal_one_with_the_joined_batch() -> None:
    """A step that is bad on one is skipped on both."""
    first, second = run_script(TWO_REPLICAS)
    assert first[1] == second[1] == [0, 0, 1, 0]  # type: ignore[index]
    assert first[2] == second[2]  # type: ignore[index]
    model, _, step = build_training(open_device("cpu"), has_norm=False)
    results = []
    for n in range(4):
        joined = batch(size=4, seed=n, jitter=float("inf") if n == 2 else 1.0)
        results.append(step([joined], 1e-3))
    means = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]  # type: ignore[index]
    expected = [float(r.losses.total) for r in results]
    assert [means[n] for n in (0, 1, 3)] == pytest.approx(
        [expected[n] for n in (0, 1, 3)], rel=1e-4
    )
    weights = [p.double().sum().item() for p in model.parameters()]
    assert first[2] == pytest.approx(weights, rel=1e-4)  # type: ignore[index]
