"""The number of training steps of the demo on machines of different speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssdctl.cli import demo
from ssdctl.config import resolve


@pytest.mark.parametrize(
    ("step_s", "left_s", "steps"),
    [
        (0.1, 240.0, demo.FULL_STEPS),  # a fast machine makes one pass over the images
        (0.6, 250.0, 360),  # 240 s for 360 steps and two evaluations
        (1.25, 230.0, demo.USEFUL_STEPS),  # a slow one takes longer than 5 minutes
        (1.0, -20.0, demo.USEFUL_STEPS),
    ],
)
def test_steps_follow_from_the_rate(step_s: float, left_s: float, steps: int) -> None:
    assert demo.affordable_steps(step_s, left_s) == steps


@pytest.mark.process
def test_the_rate_is_measured_on_this_machine() -> None:
    resolved = resolve(environment={"HOME": "/"})
    assert 1e-3 <= demo.seconds_per_step(resolved) < 60


def test_an_interrupted_demo_keeps_its_number_of_steps(tmp_path: Path) -> None:
    assert demo.steps_of_run(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.toml").write_text("[train]\nsteps = 410\n")
    assert demo.steps_of_run(tmp_path) == 410
