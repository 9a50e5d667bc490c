"""The lazy path, really run: torch_xla on the CPU. Skipped where torch_xla is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, Result
from tiny_network import Tiny, batch, build_training, everything, losses

from ssdctl.device import open_device
from ssdctl.device.base import Device
from ssdctl.distributed.ranks import SINGLE_PROCESS
from ssdctl.train.optimizer import load_optimizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="torch_xla is not installed (extra tpu; .ci/run has an environment with it)",
)
Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def xla() -> Device:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    return open_device("xla")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_losses_are_those_of_the_cpu(xla: Device, optimizer: str) -> None:
    actual, expected = (
        losses(build_training(d, optimizer=optimizer)[2]) for d in (xla, open_device("cpu"))
    )
    assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_nothing_recompiles_or_synchronizes_between_logs(xla: Device, optimizer: str) -> None:
    """With a warm-up from 0, a bad step, and clipping; then a log point, which pulls once."""
    _, _, step = build_training(xla, optimizer=optimizer, clip_grad=1.0)
    for number in range(2):  # the second has the first's results as inputs: another graph
        step([batch(seed=number)], 0.0)
    before = xla.counters()
    for number in range(5):
        jitter = float("inf") if number == 2 else 1.0
        result = step([batch(seed=number, jitter=jitter)], 1e-4 * number)
    assert xla.counters() == before
    figures = result.read(SINGLE_PROCESS)
    assert figures["loss"] > 0
    after = xla.counters()
    assert after["pulls"] == before["pulls"] + 1
    for _ in range(3):
        step([batch()], 1e-3)
    assert xla.counters()["compiles"] == after["compiles"]
    assert xla.counters()["pulls"] == after["pulls"]


def test_a_new_wait_or_a_new_shape_is_detected(
    xla: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, step = build_training(xla)
    for number in range(2):
        step([batch(seed=number)], 1e-3)
    before = xla.counters()
    step([batch(size=3)], 1e-3)
    assert xla.counters()["compiles"] > before["compiles"]
    forward = Tiny.forward

    def waiting(self: Tiny, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images.mean().item()
        return forward(self, images)

    monkeypatch.setattr(Tiny, "forward", waiting)
    before = xla.counters()
    step([batch()], 1e-3)
    assert xla.counters()["pulls"] > before["pulls"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_bad_step_moves_nothing(xla: Device, optimizer: str) -> None:
    model, state, step = build_training(xla, optimizer=optimizer)
    step([batch()], 1e-3)
    xla.synchronize()

    before = everything(model, state)
    assert step([batch(jitter=float("inf"))], 1e-3).is_bad.item() == 1
    after = everything(model, state)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    step([batch(seed=1)], 1e-3)
    assert not torch.equal(everything(model, state)["heads.weight"], before["heads.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("onto_xla", [True, False])
def test_an_optimizers_state_continues_on_another_device(
    xla: Device, optimizer: str, onto_xla: bool
) -> None:
    """The CPU's kernels are fused, XLA's are not, and its AdamW counts on the device."""
    cpu = open_device("cpu")
    first, second = (cpu, xla) if onto_xla else (xla, cpu)
    complete = losses(build_training(cpu, optimizer=optimizer)[2], steps=4)
    model, before, step = build_training(first, optimizer=optimizer)
    result = losses(step, steps=2)
    other, after, step = build_training(second, optimizer=optimizer)
    other.load_state_dict(model.state_dict())
    load_optimizer(after, torch.utils._pytree.tree_map(to_host, before.state_dict()), Path("x.pt"))
    result += losses(step, first=2, steps=2)
    assert result == pytest.approx(complete, rel=1e-4)


def to_host(value: object) -> object:
    """As in a checkpoint."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def test_fp32_is_fp32(xla: Device) -> None:
    """A TPU's own default rounds the factors of products to bf16."""
    from torch_xla import backends

    assert backends.get_mat_mul_precision() == "highest"
    xla.set_tf32(True)
    assert backends.get_mat_mul_precision() == "high"
    xla.set_tf32(False)


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


def test_bf16_runs(xla: Device) -> None:
    actual = losses(build_training(xla, "bf16")[2], steps=2)
    assert actual == pytest.approx(losses(build_training(open_device("cpu"))[2], steps=2), rel=1e-2)


@pytest.mark.slow
def test_a_run_and_its_resume(
    shapes: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Train, save, stop, resume: the losses equal the CPU's. XLA does not support detection yet."""
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train2017", "annotations"):
        (data / name).symlink_to(shapes / name)
    (data / "dataset.toml").write_text(
        '[train]\nimages = "train2017"\nannotations = "annotations/instances_train2017.json"\n'
    )
    options = TINY_RUN.replace("--device cpu", "").split()
    by_device = {}
    for device in ("cpu", "xla"):
        run = tmp_path / device
        for steps in (2, 3):
            command = ["train", "--data", data, "--out", run, "--steps", steps, *options]
            result = cli(*command, "--device", device, "--augment", "none")
            assert result.code == 0, result.err
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        by_device[device] = [r["loss"] for r in lines if r["kind"] == "train"]
    assert by_device["xla"] == pytest.approx(by_device["cpu"], rel=1e-3)
