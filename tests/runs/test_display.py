"""The line of a running training: time left, evaluations, a machine that becomes slower."""

from __future__ import annotations

import re

import pytest
from tqdm import tqdm

from ssdctl.runs.display import FIRST_STEPS, RunDisplay, RunProgress

START = {
    "kind": "start", "step": 0, "facts": [], "details": None, "images": 80, "best_ap": None,
    "total_steps": 100, "global_batch_size": 8, "evaluations": [], "evaluation_images": 0,
}  # fmt: skip


class Run:
    """A run whose clock a test moves."""

    def __init__(self, **start: object) -> None:
        self.now = 100.0
        self.progress = RunProgress(START | start, lambda: self.now)

    def take(self, steps: range, each_s: float, *, is_evaluating: bool = False) -> None:
        for step in steps:
            self.now += each_s
            self.progress.move(step, is_evaluating=is_evaluating)

    def line(self, columns: int = 80) -> str:
        bar_format = self.progress.bar_format(columns)
        return tqdm.format_meter(
            self.progress.step, START["total_steps"], 1.0, ncols=columns, bar_format=bar_format
        )


def test_the_time_left_is_known_after_three_steps_and_runs_with_the_clock() -> None:
    run = Run()
    assert "0/100" in run.line()
    run.take(range(1, FIRST_STEPS), 2.0)
    assert run.progress.time_left() == ""
    run.take(range(FIRST_STEPS, FIRST_STEPS + 1), 2.0)
    assert run.progress.time_left() == "3:14"  # 97 steps of 2 s
    run.now += 4
    assert run.progress.time_left() == "3:10"
    assert "3:10" in run.line()


@pytest.mark.parametrize(
    ("each_s", "left"), [(1.0, "1:30"), (144.0, "3:36:00"), (2400.0, "2 d 12 h")]
)
def test_the_first_step_does_not_count(each_s: float, left: str) -> None:
    run = Run()
    run.take(range(1, 2), 60.0)
    run.take(range(2, 11), each_s)
    assert run.progress.time_left() == left


def test_evaluations_count_with_their_measured_time() -> None:
    run = Run(evaluations=[50, 100], evaluation_images=40)
    run.take(range(1, 51), 1.0)
    assert run.progress.time_left() == "0:52"  # one evaluation more, as 40 x 0.4 / 8 steps
    run.take(range(50, 51), 0, is_evaluating=True)
    assert "40" in run.line()
    run.take(range(50, 51), 30)
    assert run.progress.time_left() == "1:20"  # 50 steps and another evaluation
    run.take(range(51, 61), 1.0)
    assert run.progress.time_left() == "1:10"


def test_a_slower_machine_is_told_once_and_changes_the_time_left() -> None:
    run = Run()
    assert run.progress.notice() is None
    run.take(range(1, 41), 0.5)
    assert "30 s" in (run.progress.notice() or "")
    assert run.progress.notice() is None
    run.take(range(41, 61), 2.0)
    slower = run.progress.notice() or ""
    assert "2 s per step" in slower
    assert "0.5 s per step" in slower
    assert run.progress.time_left() == "1:20"
    assert run.progress.notice() is None


def test_a_roll_back_does_not_make_the_pace_negative() -> None:
    run = Run()
    for steps in (range(1, 6), range(3, 6)):
        run.take(steps, 1.0)
    assert run.progress.time_left() == "1:35"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_line_fits_the_terminal(columns: int) -> None:
    run = Run(total_steps=238_196, images=117_266)
    run.take(range(1, 21), 2.0)
    run.progress.last = {
        "kind": "train", "step": 20, "epoch": 0.1, "loss": 13.61, "images_per_second": 1234.5,
        "memory_bytes": 30.2e9, "data_wait": 0.4,
    }  # fmt: skip
    (line,) = run.line(columns).splitlines()
    assert len(line) <= columns
    assert "20/238,196" in line


def test_the_best_evaluation_is_marked_and_each_names_its_change() -> None:
    lines: list[tuple[str, str]] = []
    display = RunDisplay(lambda _: None, lambda *line: lines.append(line), is_live=False)
    display.show(START | {"best_ap": 0.2})
    for ap in (0.1, 0.25, 0.24, -1.0, 0.3):
        scores = {"AP": ap, "AP50": ap, "AP75": ap, "loss": ap}
        display.show({"kind": "eval", "step": 1, "epoch": 1.0, **scores})
    assert [style for _, style in lines] == ["bold", "green", "bold", "bold", "green"]
    assert ["best" in text for text, _ in lines] == [False, True, False, False, True]
    changes = [re.findall(r"\((.*)\)", text) for text, _ in lines]
    assert changes == [[], ["+0.150"], ["-0.010"], [], []]
    assert "-1" not in lines[3][0]


@pytest.mark.parametrize("is_verbose", [False, True])
def test_a_display_without_a_terminal_writes_lines(is_verbose: bool) -> None:
    facts: list[tuple[str, str]] = []
    lines: list[tuple[str, str]] = []
    display = RunDisplay(
        facts.extend, lambda *line: lines.append(line), is_live=False, is_verbose=is_verbose
    )
    train = {"loss": 2.0, "loss_box": 1.0, "loss_class": 1.0, "lr": 0.1, "data_wait": 0.0}
    scores = {"AP": 0.25, "AP50": 0.5, "AP75": 0.2}
    for record in (
        START | {"facts": [("data", "shapes")], "details": "a rule"},
        {"kind": "train", "step": 7, "epoch": 1.0, "images_per_second": 4.0, **train},
        {"kind": "eval", "step": 8, "epoch": 1.0, **scores},
        {"kind": "eval", "step": 9, "epoch": 1.0, **scores},
        {"kind": "epoch", "step": 10, "epoch": 2.0, "images_per_second": 4.0, "duration_s": 3.0},
    ):
        display.show(record)
    display.close()
    assert facts == [("data", "shapes")]
    assert [style for _, style in lines[-4:]] == ["", "green", "bold", ""]
    assert [text.split()[1] for text, _ in lines[-4:]] == ["7", "8", "9", "10"]
    assert [text for text, _ in lines[:-4]] == ["a rule"] * is_verbose


def test_short_epochs_do_not_flood_the_terminal() -> None:
    lines: list[str] = []
    display = RunDisplay(lambda _: None, lambda text, _: lines.append(text), is_live=True)
    display.show(START | {"step": 0, "total_steps": 0})
    for n in range(1, 100):
        record = {"step": n, "epoch": 1.1 * n, "images_per_second": 4.0, "duration_s": 0.01}
        display.show({"kind": "epoch", **record})
    assert len(lines) == 1
    assert "epoch 1 done" in lines[0]
