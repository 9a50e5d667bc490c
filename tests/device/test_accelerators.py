"""What every accelerator does as the CPU does it."""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RUN, Cli
from helpers import records
from tiny_network import batch, build_training, everything, losses

from ssdctl.device import Device, open_device
from ssdctl.input.open import copy_ahead
from ssdctl.training.state import is_adamw, load_optimizer

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own imports warn
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
CPU = open_device("cpu")


@pytest.fixture(params=["hpu", "tpu eager", "xla", "cuda eager", "cuda compile"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    name, _, execution = request.param.partition(" ")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    if name != "cuda":
        request.getfixturevalue({"hpu": "calls", "tpu": "tpu", "xla": "xla"}[name])
    yield open_device(name, execution=execution or None)
    if execution == "compile":
        torch.compiler.reset()


def tolerance(device: Device) -> float:
    return 1e-5 if device.name in ("hpu", "tpu") else 1e-4


def copied_losses(device: Device, step: Any, steps: int) -> list[float]:
    """The losses of `tiny_network.losses`, with batches that are copied ahead as in training."""
    ahead = copy_ahead((batch(seed=n) for n in range(steps)), device)
    results = [step([micro_batch], 1e-3 * n) for n, micro_batch in enumerate(ahead)]
    return [float(result.losses.total) for result in results]


@OPTIMIZERS
def test_weights_are_those_of_the_cpu(device: Device, optimizer: str) -> None:
    """Also after bad steps, which not every optimizer can leave out by itself."""
    ends = []
    for one in (CPU, device):
        model, state, step = build_training(
            one, optimizer=optimizer, weight_decay=0.1, clip_grad=1.0
        )
        for number, jitter in enumerate((float("inf"), 1.0, 1.0, float("inf"), 1.0)):
            result = step([batch(seed=number, jitter=jitter)], 1e-2)
            assert bool(result.is_bad) == (jitter != 1.0)
        ends.append(everything(model, state))
    rel = tolerance(device)
    for name, expected in ends[0].items():
        atol = rel if name[0].isdigit() else rel / 100  # the optimizer's state, or a weight
        torch.testing.assert_close(ends[1][name], expected, rtol=rel, atol=atol, check_dtype=False)


def test_lower_precisions_are_close(device: Device) -> None:
    expected = losses(build_training(CPU)[2])
    for precision in {*device.precisions} - {"fp32"}:
        _, optimizer, step = build_training(device, precision)
        if precision == "fp16":  # already adapted: else the first steps are skipped
            state = optimizer.state_dict()
            state["loss_scale"] = [torch.tensor(256.0), torch.tensor(0)]
            optimizer.load_state_dict(state)
        assert copied_losses(device, step, 4) == pytest.approx(expected, rel=2e-2), precision


@OPTIMIZERS
def test_a_bad_step_changes_nothing(device: Device, optimizer: str) -> None:
    """Neither weights nor momentum nor AdamW's count."""
    model, state, step = build_training(device, optimizer=optimizer)
    for number in range(3):
        step([batch(seed=number)], 1e-3)
    device.synchronize()
    before = {name: tensor.clone() for name, tensor in everything(model, state).items()}
    assert step([batch(jitter=float("inf"))], 1e-3).is_bad.item() == 1
    after = everything(model, state)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(int(value) == 3 for name, value in after.items() if name.endswith(".step"))
    step([batch(seed=1)], 1e-3)
    assert not torch.equal(everything(model, state)["heads.weight"], before["heads.weight"])


@OPTIMIZERS
@pytest.mark.parametrize("is_first", [True, False])
def test_optimizer_state_changes_devices(device: Device, optimizer: str, is_first: bool) -> None:
    """Its kernels, and how they count their steps, are the device's own."""
    first, second = (device, CPU) if is_first else (CPU, device)
    complete = losses(build_training(CPU, optimizer=optimizer)[2], steps=4)
    model, before, step = build_training(first, optimizer=optimizer)
    result = losses(step, steps=2)
    other, after, step = build_training(second, optimizer=optimizer)
    settings = {k: v for k, v in after.param_groups[0].items() if k not in ("params", "lr")}
    other.load_state_dict(model.state_dict())
    saved = torch.utils._pytree.tree_map(to_host, before.state_dict())
    load_optimizer(after, copy.deepcopy(saved), Path("x.pt"))
    result += losses(step, first=2, steps=2)
    assert result == pytest.approx(complete, rel=tolerance(device))
    assert is_adamw(after) == (optimizer == "adamw")
    assert {k: after.param_groups[0][k] for k in settings} == settings


def to_host(value: object) -> object:
    """As in a checkpoint."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "execution", "rel"),
    [("xla", "lazy", 1e-3), ("cuda", "eager", 1e-2), ("cuda", "compile", 1e-2)],
)
def test_a_run_and_its_resume(
    shapes: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    execution: str,
    rel: float,
) -> None:
    """Train, save, stop, resume, evaluate: the losses and the score are those of the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    if name == "xla" and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    options = TINY_RUN.replace("--device cpu", "").split()
    options += ["--augment", "none", "--set", "evaluate.batch_size=4"]
    by_device, scores = {}, {}
    # PyTorch must see XLA before the first backward pass.
    for device, how in ((name, execution), ("cpu", "eager")):
        run = tmp_path / device
        for steps in (2, 4):
            command = ["train", "--data", shapes, "--out", run, "--steps", steps, *options]
            cli(*command, "--device", device, "--execution", how).expect(0)
        by_device[device] = [r["loss"] for r in records(run, "train")]
        scores[device] = [r["AP50"] for r in records(run, "eval")]
    assert by_device[name] == pytest.approx(by_device["cpu"], rel=rel)
    assert scores[name] == pytest.approx(scores["cpu"], abs=rel)
    assert scores["cpu"]
