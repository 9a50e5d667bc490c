"""The line of a running training: time left, evaluations, a machine that becomes slower."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from ssdctl.runs.display import FIRST_STEPS, Pace, RunDisplay, RunProgress, describe


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def start(**values: object) -> dict[str, object]:
    return {
        "kind": "start", "step": 0, "facts": [], "details": None, "images": 80, "best_ap": None,
        "total_steps": 100, "global_batch_size": 8, "evaluations": [], "evaluation_images": 0,
    } | values  # fmt: skip


@pytest.fixture
def progress(clock: Clock) -> RunProgress:
    return RunProgress(clock)


@pytest.fixture
def take(progress: RunProgress, clock: Clock) -> Callable[[int, int, float], None]:
    def steps(first: int, last: int, each_s: float) -> None:
        for step in range(first, last + 1):
            clock.now += each_s
            progress.update({"kind": "position", "step": step, "is_evaluating": False})

    return steps


def shown(progress: RunProgress, columns: int = 80) -> str:
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(progress.line(columns))
    return capture.get()


Take = Callable[[int, int, float], None]


def test_the_time_left_is_known_after_three_steps_and_runs_with_the_clock(
    progress: RunProgress, take: Take, clock: Clock
) -> None:
    progress.update(start())
    assert "0/100" in shown(progress)
    take(1, FIRST_STEPS - 1, 2.0)
    assert progress.time_left() == ""
    take(FIRST_STEPS, FIRST_STEPS, 2.0)
    assert progress.time_left() == "3:14"  # 97 steps of 2 s
    clock.now += 4
    assert progress.time_left() == "3:10"
    assert "3:10" in shown(progress)


def test_the_first_step_does_not_count(progress: RunProgress, take: Take) -> None:
    progress.update(start())
    take(1, 1, 60.0)
    take(2, 10, 1.0)
    assert progress.time_left() == "1:30"


def test_evaluations_count_with_their_measured_time(
    progress: RunProgress, take: Take, clock: Clock
) -> None:
    progress.update(start(evaluations=[50, 100], evaluation_images=40))
    take(1, 50, 1.0)
    assert progress.time_left() == "0:52"  # one evaluation more, as 40 x 0.4 / 8 steps
    progress.update({"kind": "position", "step": 50, "is_evaluating": True})
    assert "40" in shown(progress)
    clock.now += 30
    progress.update({"kind": "position", "step": 50, "is_evaluating": False})
    assert progress.time_left() == "1:20"  # 50 steps and another evaluation
    take(51, 60, 1.0)
    assert progress.time_left() == "1:10"


def test_a_slower_machine_is_told_once_and_changes_the_time_left(
    progress: RunProgress, take: Take
) -> None:
    progress.update(start())
    assert progress.notice() is None
    take(1, 40, 0.5)
    first = progress.notice()
    assert first is not None
    assert "30 s" in first
    assert progress.notice() is None
    take(41, 60, 2.0)
    slower = progress.notice()
    assert slower is not None
    assert "2 s per step" in slower
    assert "0.5 s per step" in slower
    assert progress.time_left() == "1:20"
    assert progress.notice() is None


def test_a_roll_back_does_not_make_the_pace_negative(clock: Clock) -> None:
    pace = Pace(start(), clock)
    for step in (1, 2, 3, 4, 5, 3, 4, 5):
        clock.now += 1
        pace.stepped(step)
    assert pace.seconds_left() == pytest.approx(95)


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_line_fits_the_terminal(progress: RunProgress, take: Take, columns: int) -> None:
    progress.update(start(total_steps=238_196, images=117_266))
    take(1, 20, 2.0)
    progress.update(
        {"kind": "train", "step": 20, "epoch": 0.1, "loss": 13.61, "images_per_second": 1234.5,
         "memory_bytes": 30.2e9, "data_wait": 0.4}
    )  # fmt: skip
    (line,) = shown(progress, columns).splitlines()
    assert len(line) <= columns
    assert "20/238,196" in line


def test_the_best_evaluation_is_marked(progress: RunProgress) -> None:
    progress.update(start(best_ap=0.2))
    rows = []
    for ap in (0.1, 0.25, 0.24, -1.0):
        record = {"kind": "eval", "step": 1, "epoch": 1.0, "AP": ap, "AP50": ap, "AP75": ap}
        rows.append(progress.scored(record))
        assert describe(record, *rows[-1])
    assert [is_best for _, is_best in rows] == [False, True, False, False]
    assert [change for change, _ in rows] == [None, pytest.approx(0.15), pytest.approx(-0.01), None]


@pytest.mark.parametrize("options", [{}, {"is_verbose": True}])
def test_a_display_without_a_terminal_writes_lines(options: dict[str, bool]) -> None:
    facts: list[tuple[str, str]] = []
    lines: list[tuple[str, str]] = []
    display = RunDisplay(facts.extend, lambda *line: lines.append(line), is_live=False, **options)
    train = {"loss": 2.0, "loss_box": 1.0, "loss_class": 1.0, "lr": 0.1, "data_wait": 0.0}
    scores = {"AP": 0.25, "AP50": 0.5, "AP75": 0.2}
    for record in (
        start(facts=[("data", "shapes")], details="a rule"),
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
    assert [text for text, _ in lines[:-4]] == ["a rule"] * len(options)
