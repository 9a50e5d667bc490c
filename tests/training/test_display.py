"""The line of a running training: time left, evaluations, a machine that becomes slower."""

from __future__ import annotations

import pytest
from observed import plan_of
from tqdm import tqdm

from ssdctl.training.observers.display import FIRST_STEPS, Pace
from ssdctl.training.plan import Plan

PLAN = plan_of(80, batch_size=8, epochs=10)  # 100 steps


class Run:
    """A run whose clock a test moves."""

    def __init__(self, plan: Plan = PLAN, val_images: int = 0) -> None:
        self.now = 100.0
        self.plan = plan
        self.pace = Pace(plan, 0, val_images, lambda: self.now)

    def take(self, steps: range, each_s: float) -> None:
        for step in steps:
            self.now += each_s
            self.pace.step_done(step)

    def evaluate(self, duration_s: float) -> None:
        self.pace.evaluation_begins()
        assert "evaluating" in self.line()
        self.now += duration_s
        self.pace.evaluation_ends()

    def line(self, columns: int = 80) -> str:
        bar_format = self.pace.bar_format(columns)
        return tqdm.format_meter(
            self.pace.step, self.plan.total_steps, 1.0, ncols=columns, bar_format=bar_format
        )


def test_the_time_left_is_known_after_three_steps_and_runs_with_the_clock() -> None:
    run = Run()
    assert "0/100" in run.line()
    run.take(range(1, FIRST_STEPS), 2.0)
    assert run.pace.time_left() == ""
    run.take(range(FIRST_STEPS, FIRST_STEPS + 1), 2.0)
    assert run.pace.time_left() == "3:14"  # 97 steps of 2 s
    run.now += 4
    assert run.pace.time_left() == "3:10"
    assert "3:10" in run.line()


@pytest.mark.parametrize(
    ("each_s", "left"), [(1.0, "1:30"), (144.0, "3:36:00"), (2400.0, "2 d 12 h")]
)
def test_the_first_step_does_not_count(each_s: float, left: str) -> None:
    run = Run()
    run.take(range(1, 2), 60.0)
    run.take(range(2, 11), each_s)
    assert run.pace.time_left() == left


def test_evaluations_count_with_their_measured_time() -> None:
    run = Run(plan_of(80, batch_size=8, epochs=10, eval_every="50st"), val_images=40)
    run.take(range(1, 51), 1.0)
    assert run.pace.time_left() == "0:52"  # one evaluation more, as 40 x 0.4 / 8 steps
    run.evaluate(30)
    assert run.pace.time_left() == "1:20"  # 50 steps and another evaluation
    run.take(range(51, 61), 1.0)
    assert run.pace.time_left() == "1:10"


def test_a_slower_machine_is_told_once_and_changes_the_time_left() -> None:
    run = Run()
    assert run.pace.notice() is None
    run.take(range(1, 41), 0.5)
    assert "30 s" in (run.pace.notice() or "")
    assert run.pace.notice() is None
    run.take(range(41, 61), 2.0)
    slower = run.pace.notice() or ""
    assert "2 s per step" in slower
    assert "0.5 s per step" in slower
    assert run.pace.time_left() == "1:20"
    assert run.pace.notice() is None


def test_a_roll_back_does_not_make_the_pace_negative() -> None:
    run = Run()
    for steps in (range(1, 6), range(3, 6)):
        run.take(steps, 1.0)
    assert run.pace.time_left() == "1:35"
