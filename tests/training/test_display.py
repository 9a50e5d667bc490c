"""The line of a running training: time left, evaluations, a machine that becomes slower."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from observed import epoch_of, plan_of, scored, start_of, step_of
from tqdm import tqdm

from ssdctl.training.observers import StepMetrics
from ssdctl.training.observers.display import FIRST_STEPS, Display, Pace
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


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_line_fits_the_terminal(columns: int) -> None:
    run = Run(plan_of(117_266, batch_size=32, epochs=65))
    run.take(range(1, 21), 2.0)
    run.pace.last = StepMetrics(13.61, 1.0, 12.0, 0.1, 1234.5, 1.0, 0.4, 30_200_000_000)
    (line,) = run.line(columns).splitlines()
    assert len(line) <= columns
    assert "20/238,196" in line


def test_the_best_evaluation_is_marked_and_each_names_its_change() -> None:
    lines: list[tuple[str, str]] = []
    display = Display(lambda _: None, lambda *line: lines.append(line), is_live=False)
    display.on_start(start_of(PLAN, past=[{"kind": "eval", "step": 1, "AP": 0.2}]))
    for ap in (0.1, 0.25, 0.24, -1.0, 0.3):
        display.on_evaluation(scored(1, AP=ap, AP50=ap, AP75=ap, loss=ap))
    assert [style for _, style in lines] == ["bold", "green", "bold", "bold", "green"]
    assert ["best" in text for text, _ in lines] == [False, True, False, False, True]
    changes = [re.findall(r"\((.*)\)", text) for text, _ in lines]
    assert changes == [[], ["+0.150"], ["-0.010"], [], []]
    assert "-1" not in lines[3][0]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_display_without_a_terminal_writes_lines(is_verbose: bool) -> None:
    facts: list[tuple[str, str]] = []
    lines: list[tuple[str, str]] = []
    display = Display(
        facts.extend, lambda *line: lines.append(line), is_live=False, is_verbose=is_verbose
    )
    scores = {"AP": 0.25, "AP50": 0.5, "AP75": 0.2}
    display.on_start(start_of(dataclasses.replace(PLAN, rule="a rule (few images)")))
    for logged in (False, True):
        display.on_step(step_of(7, is_logged=logged))
    display.on_evaluation(scored(8, **scores))
    display.on_evaluation(scored(9, **scores))
    display.on_epoch(epoch_of(10, 2, 3.0))
    display.close()
    assert [name for name, _ in facts] == ["data", "network", "device", "length", "recipe", "run"]
    assert [style for _, style in lines[-4:]] == ["", "green", "bold", ""]
    assert [text.split()[1] for text, _ in lines[-4:]] == ["7", "8", "9", "10"]
    assert ["a rule" in text for text, _ in lines[:-4]] == [True] * is_verbose


def test_short_epochs_do_not_flood_the_terminal() -> None:
    lines: list[str] = []
    display = Display(lambda _: None, lambda text, _: lines.append(text), is_live=False)
    display.on_start(start_of(PLAN))
    for n in range(1, 100):
        display.on_epoch(epoch_of(n, n, 0.01))
    assert len(lines) == 1
    assert "epoch 1 done" in lines[0]


def test_an_epoch_does_not_repeat_the_loss_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", itertools.count(step=5).__next__)
    lines: list[str] = []
    display = Display(lambda _: None, lambda text, _: lines.append(text), is_live=False)
    display.on_start(start_of(PLAN))
    display.on_step(step_of(7, is_logged=True))
    lines.clear()
    for n in (7, 8, 9):
        display.on_epoch(epoch_of(n, n, 0.01))
    assert len(lines) == 1
    assert "epoch 7 done" in lines[0]
    assert "loss" in lines[0]
