"""The lazy path, really run: torch_xla on the CPU. Skipped where torch_xla is not installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_network import batch, build_training

from ssdctl.device import Device, open_device
from ssdctl.distributed import SINGLE_PROCESS

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


def test_two_cores_of_one_process_share_each_batch() -> None:
    argv = [sys.executable, "-c", TWO_CORES, str(Path(__file__).parents[1])]
    variables = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    # In the background, the programs of both devices wait for the same few threads.
    environment = {**os.environ, **variables, "PJRT_CPU_ASYNC_CLIENT": "0"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    label, sharding, has_no_new_graphs, actual = json.loads(done.stdout.splitlines()[-1])
    assert label == "XLA CPU, 2 cores"
    assert sharding.startswith("{devices=[2,1,1,1]")
    assert has_no_new_graphs
    _, _, step = build_training(open_device("cpu"))
    results = [step([batch(size=4, seed=n)], 1e-3 * n) for n in range(5)]
    assert actual == pytest.approx([float(r.losses.total) for r in results], rel=1e-4)
