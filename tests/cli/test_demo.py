"""The number of training steps of the demo on machines of different speed."""

from pathlib import Path

import pytest

from ssdctl.cli import demo


@pytest.mark.parametrize(
    ("step_s", "left_s", "fewest", "most"),
    [
        (0.1, 240.0, demo.FULL_STEPS, demo.FULL_STEPS),  # a fast machine: one pass over the images
        (0.5, 280.0, demo.USEFUL_STEPS + 10, 400),
        (1.25, 230.0, demo.USEFUL_STEPS, demo.USEFUL_STEPS),  # a slow one takes longer
        (1.0, -20.0, demo.USEFUL_STEPS, demo.USEFUL_STEPS),
    ],
)
def test_steps_follow_from_the_speed(step_s: float, left_s: float, fewest: int, most: int) -> None:
    steps = demo.affordable_steps(step_s, left_s)
    assert fewest <= steps <= most
    total_s = demo.total_seconds(steps, step_s)
    assert steps * step_s <= total_s
    assert total_s <= left_s or steps == demo.USEFUL_STEPS


def test_an_interrupted_demo_keeps_its_number_of_steps(tmp_path: Path) -> None:
    assert demo.steps_of_run(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "config.toml").write_text("[train]\nsteps = 410\n")
    assert demo.steps_of_run(tmp_path) == 410
