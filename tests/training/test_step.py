"""A step, where a bad one moves nothing, and parts of the loop: average, end, throughput, memory."""

import pytest
import torch
from tiny_network import batch, config

from ssdctl.device import open_device
from ssdctl.distributed import Ranks
from ssdctl.errors import IntegrityError, NonFiniteError
from ssdctl.input.batch import Batch
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.evaluator import EarlyStopping
from ssdctl.training.optimizer import build_optimizer, clip_factor
from ssdctl.training.state import EMA, RankStatistics
from ssdctl.training.step import (
    MAX_CONSECUTIVE,
    MAX_ROLLBACKS,
    BadStep,
    NonFiniteGuard,
    TrainStep,
    build_step,
)
from ssdctl.training.throughput import ThroughputMeter

SINGLE_PROCESS = Ranks(0, 1, 0)
CPU = open_device("cpu")


def build_training(**changes: object) -> tuple[SSD300, torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    settings = config(**changes)
    model = SSD300("tiny", 4, "none").train()
    step = build_step(model, settings, CPU, "fp32")
    return model, step.optimizer, step


def test_accumulation_equals_the_larger_batch() -> None:
    """Batch norm sees other batches, so it is frozen; the rest is a mean of means."""
    full_batch = batch(2)
    halves = [Batch(*(field[i : i + 1] for field in full_batch[:4]), rows=None) for i in (0, 1)]  # type: ignore[arg-type]
    ends = []
    for batches in ([full_batch], halves):
        model, _, step = build_training(clip_grad=0)
        model.freeze_norm()
        step(batches, 1e-2)
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-6, msg=name)


def test_clipping_bounds_the_update() -> None:
    model, _, step = build_training(clip_grad=0.5, momentum=0, weight_decay=0)
    before = [p.detach().clone() for p in model.parameters()]
    result = step([batch(1)], 1.0).read(SINGLE_PROCESS)
    assert result["grad_norm"] > 0.5
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_decay_of_biases_and_of_batch_norm_are_two_switches(bias: bool, norm: bool) -> None:
    model, optimizer, _ = build_training()
    if bias or norm:  # neither is the default
        optimizer = build_optimizer(model, config(decay_bias=bias, decay_norm=norm), CPU)
    groups = optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [5e-4, 0][: len(groups)]
    decayed = {id(p) for p in groups[0]["params"]}
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    assert norms
    for layer in norms:
        assert (id(layer.weight) in decayed) is (id(layer.bias) in decayed) is norm
    for layer in convolutions:
        assert id(layer.weight) in decayed
        assert layer.bias is None or (id(layer.bias) in decayed) is bias
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def flags(guard: NonFiniteGuard, *bad: bool) -> list[int]:
    for number, is_bad in enumerate(bad, start=1):
        guard.watch(number, torch.tensor(float(is_bad)), [number * 10])
    return [entry.step for entry in guard.check()]


def test_guard_raises_only_after_many_consecutive_bad_steps() -> None:
    guard = NonFiniteGuard("skip")
    flags(guard, *[True, False] * MAX_CONSECUTIVE)
    guard.should_roll_back([BadStep(1, [1])], "folder")
    for _ in range(2):
        flags(guard, *[True] * (MAX_CONSECUTIVE // 2))
    with pytest.raises(NonFiniteError, match="folder"):
        guard.should_roll_back([BadStep(1, [1])], "folder")


def test_guard_bounds_rollbacks() -> None:
    guard = NonFiniteGuard("rollback")
    for _ in range(MAX_ROLLBACKS):
        assert guard.should_roll_back([BadStep(1, [1])], "folder")
    with pytest.raises(NonFiniteError):
        guard.should_roll_back([BadStep(1, [1])], "folder")


def test_the_factor_of_clipping() -> None:
    factors = clip_factor(torch.tensor([0.0, 2.0, 8.0, torch.nan]), 4.0).tolist()
    assert factors == pytest.approx([1, 1, 0.5, 1], rel=1e-6)
    assert clip_factor(torch.zeros(()), 1e-9) < 0.01  # the norm is never divided by alone


@pytest.mark.parametrize("had_ema", [False, True])
def test_statistics_of_ranks_are_loaded_if_the_ema_is_switched(had_ema: bool) -> None:
    model = SSD300("tiny", 4, "none")
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    saved = [torch.full_like(buffer, 7) for buffer in buffers]
    ema = None if had_ema else EMA(model, 0.5)
    statistics = RankStatistics(model, ema, SINGLE_PROCESS)
    statistics.load([[*saved, *saved * had_ema]], 3)
    assert all(buffer.eq(7).all() for buffer in buffers)
    with pytest.raises(IntegrityError):
        statistics.load([saved[1:]], 3)


def test_frozen_stem_keeps_its_weights_and_moves_its_statistics() -> None:
    torch.manual_seed(0)
    settings = config(freeze_stem=True, weight_decay=0.1)
    model = SSD300("tiny", 4, "none").train()
    model.freeze_stem()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = build_step(model, settings, CPU, "fp32")
    step([batch(2)], 1e-2)
    same = {n for n, t in model.state_dict().items() if torch.equal(t, before[n])}
    frozen = {"backbone.conv1.weight", "backbone.bn1.weight", "backbone.layer1.0.conv1.weight"}
    assert frozen <= same
    assert "backbone.bn1.running_mean" not in same
    assert "backbone.layer1.1.conv1.weight" not in same
    assert "backbone.layer1.0.conv2.weight" not in same


@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
def test_a_bad_first_step_leaves_no_trace(optimizer_name: str) -> None:
    """The step after it is the one that a fresh run would have taken."""
    ends = []
    for batches in ([batch(1, jitter=float("inf")), batch(1)], [batch(1)]):
        model, _, step = build_training(optimizer=optimizer_name)
        for entry in batches:
            result = step([entry], 1e-3)
        assert result.read(SINGLE_PROCESS)["is_bad"] == 0
        ends.append(model.state_dict())
    for name, tensor in ends[0].items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=0, msg=name)


def test_ends_at_the_target_or_without_improvement() -> None:
    best = EarlyStopping(None, target=0.5, patience=2)
    assert [best.update(ap) for ap in (0.3, 0.2, 0.3)] == [True, False, False]
    assert "--patience" in str(best.reason_to_end())
    assert best.update(0.4)
    assert best.reason_to_end() is None
    assert best.update(0.5)
    assert "--target-ap" in str(best.reason_to_end())
    undefined = EarlyStopping(-1.0, target=-2, patience=1)  # no objects
    assert not undefined.update(-1.0)
    assert undefined.ap is undefined.reason_to_end() is None


def test_average_keeps_the_share_of_its_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    start = model.weight.detach().clone()
    ema = EMA(model, 0.75)
    with monkeypatch.context() as patch:
        # A list of all weights takes the host as long as a step of a small network.
        patch.setattr(model, "state_dict", None)
        for _ in range(2):
            model.weight.data += 1
            ema.update()
    # 0.75 x 0.25 of the first step, 0.25 x 2 of the second
    assert torch.allclose(ema.state()["weight"], start + 0.6875)


def test_throughput_reports_input_bound_training_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    pace = ThroughputMeter(global_batch=8)
    pace.start()
    results = []
    for _ in range(8):
        with pace.waiting():
            now[0] += 0.5
        now[0] += 0.5
        pace.step_done()
        with pace.paused():
            now[0] += 100
        pace.mark()  # the loop is left
        with pace.paused():
            now[0] += 100
        now[0] += 100
        pace.start()
        lap = pace.lap()
        assert lap.images_per_second == pytest.approx(8)
        assert lap.data_wait == pytest.approx(0.5)
        results.append(lap.is_input_bound)
    assert results == [False] * 4 + [True] + [False] * 3
    assert pace.images_per_second == pytest.approx(8)
    assert pace.data_wait == pytest.approx(0.5)
