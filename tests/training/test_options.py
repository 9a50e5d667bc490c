"""Options of the loop: when it evaluates and ends, averaging, and its messages."""

from __future__ import annotations

import pytest
import torch

from ssdctl.training.evaluator import EarlyStopping
from ssdctl.training.memory import USED_SHARE, MemoryEstimate
from ssdctl.training.run_log import ThroughputMeter
from ssdctl.training.state import EMA


def test_ends_at_the_target() -> None:
    best = EarlyStopping(None, 0.5, None)
    assert best.update(0.3)
    assert best.reason_to_end() is None
    assert best.update(0.5)
    assert "--target-ap" in str(best.reason_to_end())
    assert not best.update(0.4)


def test_an_evaluation_without_objects_has_no_ap() -> None:
    best = EarlyStopping(-1.0, 0.5, 1)
    assert not best.update(-1.0)
    assert best.ap is None
    assert best.reason_to_end() is None


def test_average_keeps_the_share_of_its_decay() -> None:
    model = torch.nn.Linear(2, 1)
    start = model.weight.detach().clone()
    ema = EMA(model, 0.75)
    for _ in range(2):
        model.weight.data += 1
        ema.update()
    # 0.75 x 0.25 of the first step, 0.25 x 2 of the second
    assert torch.allclose(ema.state()["weight"], start + 0.6875)


def test_an_update_of_the_average_does_not_list_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of all weights takes the host as long as a step of a small network."""
    model = torch.nn.Linear(2, 1)
    ema = EMA(model, 0.75)
    monkeypatch.setattr(model, "state_dict", None)
    ema.update()


def test_throughput_reports_once_that_training_is_input_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
        lap = pace.lap()
        assert lap.images_per_second == pytest.approx(8)
        assert lap.data_wait == pytest.approx(0.5)
        results.append(lap.is_input_bound)
    assert results == [False] * 4 + [True] + [False] * 3
    assert pace.images_per_second == pytest.approx(8)
    assert pace.data_wait == pytest.approx(0.5)


def test_a_batch_that_fits_is_a_multiple_of_eight() -> None:
    need = MemoryEstimate(fixed=50, per_image=100)
    images = (0, 1, 7, 8, 9, 15, 16, 17)
    fits = [need.fits(int((100 * n + 60) / USED_SHARE)) for n in images]
    assert fits == [0, 1, 7, 8, 8, 8, 16, 16]
