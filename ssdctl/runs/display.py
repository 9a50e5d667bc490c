"""Show the progress of a run from its records: its position and pace, as a line. Torch-free.

Besides the records of metrics.jsonl the training loop emits two kinds that are not written there:
`start` (`facts`, `details`, `total_steps`, `evaluations`, `evaluation_images`, `best_ap`) before
the first step, and `position` (`step`, `is_evaluating`) after every step and before an evaluation.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ssdctl.runs.metrics import Record
from ssdctl.runtime.progress import progress_bar

FIRST_STEPS = 3  # before the time left is known; the first step also allocates
WINDOW_S = 20.0  # the pace is that of the last seconds
SETTLED_S = 8.0  # the shortest time after which a pace is compared
SAMPLE_S = 0.1  # between two positions that are kept
EVALUATION_COST = 0.4  # an image's, in trained ones: the first estimate; measured on two cores
SLOWER = 1.7  # times the first pace: worth telling
STARVED = 0.2  # fraction of the time spent waiting for images: worth telling
FEWEST_BAR_COLUMNS = 10
EPOCH_LINES_S = 1.0  # the shortest time between two lines about epochs


class RunProgress:
    """The position, pace and time left of a run.

    Args:
        start: The record before the first step.
        clock: Returns seconds.
    """

    def __init__(self, start: Record, clock: Callable[[], float] = time.monotonic) -> None:
        self._start, self._clock = start, clock
        self._step = start["step"]
        self.last: Record = {}  # the kind is `train`
        self._num_steps = 0  # that this process trained
        self._recent: deque[tuple[float, int]] = deque()  # time and step
        self._step_s: float | None = None  # seconds per step; None: not known yet
        self._told_step_s: float | None = None
        self._evaluation_began: float | None = None
        self._evaluation_s: float | None = None
        self._end: float | None = None  # when the run ends, by the clock

    def move(self, step: int, *, is_evaluating: bool) -> None:
        now = self._clock()
        self._step = step
        if is_evaluating:
            self._evaluation_began = now
            return
        if self._evaluation_began is None:
            self._measure(now, step)
        else:
            self._evaluation_s, self._evaluation_began = now - self._evaluation_began, None
            self._recent = deque([(now, step)])
        if self._step_s is not None:
            self._end = now + self._estimate(step, self._step_s)

    def _measure(self, now: float, step: int) -> None:
        recent = self._recent
        self._num_steps += 1
        if recent and step < recent[-1][1]:
            recent.clear()  # rolled back
        if not recent or now - recent[-1][0] >= SAMPLE_S or self._step_s is None:
            recent.append((now, step))
        while len(recent) > 3 and recent[1][0] < now - WINDOW_S:
            recent.popleft()
        (began, first), (ended, last) = recent[0], recent[-1]
        if self._num_steps >= FIRST_STEPS and last > first:
            self._step_s = (ended - began) / (last - first)

    def _estimate(self, step: int, step_s: float) -> float:
        """Return the seconds that the run takes after a step."""
        start, evaluation_s = self._start, self._evaluation_s
        if evaluation_s is None:
            cost = EVALUATION_COST * start["evaluation_images"] / start["global_batch_size"]
            evaluation_s = cost * step_s
        evaluations = sum(due > step for due in start["evaluations"])
        return (start["total_steps"] - step) * step_s + evaluations * evaluation_s

    def notice(self) -> str | None:
        """Return a one-time notice: how long the run takes, or that it became slower."""
        left, before, recent = self.seconds_left(), self._told_step_s, self._recent
        if self._step_s is None or left is None:
            return None
        if before is None:
            self._told_step_s = self._step_s
            return f"about {duration(left)} at {step_time(self._step_s)}"
        is_settled = len(recent) > FIRST_STEPS and recent[-1][0] - recent[0][0] >= SETTLED_S
        if not is_settled or self._step_s < SLOWER * before:
            return None
        self._told_step_s = self._step_s
        return (
            f"slower now, {step_time(self._step_s)} instead of {step_time(before)}: "
            f"about {duration(left)} left"
        )

    def seconds_left(self) -> float | None:
        """Return the seconds until the run ends; None before the first steps."""
        return None if self._end is None else max(self._end - self._clock(), 0.0)

    def time_left(self) -> str:
        """Return the time left, such as 1:12 or 2:03:04; empty if it is not known yet."""
        seconds = self.seconds_left()
        if seconds is None:
            return ""
        if seconds >= 48 * 3600:
            return duration(seconds)
        whole = round(seconds)
        hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
        return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

    def bar_format(self, columns: int) -> str:
        """Return tqdm's format of the line: position, bar, epochs, time left, loss, rate, memory.

        Args:
            columns: Of the terminal; the last facts are left out if they do not fit.
        """
        texts = [f"step {self._step:,}/{self._start['total_steps']:,}", *self._facts()]
        while columns < FEWEST_BAR_COLUMNS + sum(len(text) + 2 for text in texts) and texts[1:]:
            texts.pop()
        return "  ".join([f"{texts[0]} |{{bar}}|", *texts[1:]])

    @property
    def step(self) -> int:
        return int(self._step)

    def _facts(self) -> list[str]:
        epoch = self._step * self._start["global_batch_size"] / max(self._start["images"], 1)
        left = self.time_left()
        facts = [f"{epoch:.2f} ep", f"{left} left" if left else "first step..."]
        if self._evaluation_began is not None:
            return [*facts, f"evaluating {self._start['evaluation_images']:,} images"]
        if not (last := self.last):
            return facts
        facts += [
            f"loss {last['loss']:.2f}",
            f"{last['images_per_second']:,.1f} img/s",
            f"{last['memory_bytes'] / 1e9:.1f} GB",
        ]
        if last["data_wait"] >= STARVED:
            facts.append(f"data wait {last['data_wait']:.0%}")
        return facts


class RunDisplay:
    """Show the records of a run: lines at its start, a redrawn line, permanent lines.

    Args:
        facts: Writes the lines at the start, each a name and a text.
        write: Writes a permanent line in a style: `green`, `bold` or none.
        is_live: Redraw a line.
        has_steps: Also write the records of steps if a line is redrawn.
        is_verbose: Also write the values that a rule chose.
    """

    def __init__(
        self,
        facts: Callable[[Sequence[tuple[str, str]]], None],
        write: Callable[[str, str], None],
        *,
        is_live: bool,
        has_steps: bool = False,
        is_verbose: bool = False,
    ) -> None:
        self._facts, self._write = facts, write
        self._is_live, self._is_verbose = is_live, is_verbose
        self._has_steps = has_steps or not is_live
        self._ap: float | None = None  # the last evaluation's
        self._best_ap: float | None = None
        self._epoch_shown_at = -EPOCH_LINES_S
        self._stack = contextlib.ExitStack()
        self._bar: Any = None

    def close(self) -> None:
        self._stack.close()

    def show(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "start":
            self._begin(record)
        elif kind == "position":
            self._progress.move(record["step"], is_evaluating=record["is_evaluating"])
            self._redraw(at_once=record["is_evaluating"])
            if not record["is_evaluating"] and (notice := self._progress.notice()):
                self._write(notice, "")
        elif kind == "eval":
            self._show_evaluation(record)
        elif kind == "epoch":
            self._show_epoch(record)
        elif kind == "train":
            self._progress.last = record
            if self._has_steps:
                left = self._progress.time_left()
                self._write(_step(record) + (f"  {left} left" if left else ""), "")

    def _show_epoch(self, record: Record) -> None:
        if time.monotonic() - self._epoch_shown_at < EPOCH_LINES_S:
            return
        self._epoch_shown_at = time.monotonic()
        loss = f", loss {self._progress.last['loss']:.3f}" if self._progress.last else ""
        self._write(
            f"step {record['step']:,}  epoch {int(record['epoch'])} done in "
            f"{duration(record['duration_s'])}, {record['images_per_second']:.1f} img/s{loss}",
            "",
        )

    def _begin(self, start: Record) -> None:
        self._progress, self._best_ap = RunProgress(start), start["best_ap"]
        self._facts(start["facts"])
        if self._is_verbose and start["details"]:
            self._write(start["details"], "")
        if self._is_live and start["step"] < start["total_steps"]:
            total, step = start["total_steps"], start["step"]
            bar = progress_bar(
                total=total,
                initial=step,
                miniters=1,  # the time between two redraws counts, not the number of steps
                bar_format=self._progress.bar_format(shutil.get_terminal_size().columns),
            )
            self._bar = self._stack.enter_context(bar)

    def _redraw(self, *, at_once: bool) -> None:
        if self._bar is None:
            return
        self._bar.bar_format = self._progress.bar_format(shutil.get_terminal_size().columns)
        self._bar.update(self._progress.step - self._bar.n)
        if at_once:
            self._bar.refresh()

    def _show_evaluation(self, record: Record) -> None:
        position, ap, before = f"step {record['step']:,}", record["AP"], self._ap
        self._ap = ap
        if ap < 0:
            text = f"{position}  no AP: the validation split has no annotated objects"
            self._write(text, "bold")
            return
        change = "" if before is None or before < 0 else f" ({ap - before:+.3f})"
        texts = [position, f"AP {ap:.3f}{change}"]
        texts += [f"{name} {record[name]:.3f}" for name in ("AP50", "AP75")]
        if "loss" in record:
            texts.append(f"val loss {record['loss']:.2f}")
        is_best = self._best_ap is None or ap > self._best_ap
        if is_best:
            self._best_ap = ap
            texts.append("best")
        self._write("  ".join(texts), "green" if is_best else "bold")


def _step(record: Record) -> str:
    wait = f"  data wait {record['data_wait']:.0%}" if record["data_wait"] >= 0.05 else ""
    losses = f"loss {record['loss']:.3f} (box {record['loss_box']:.3f}, class "
    return (
        f"step {record['step']:,}  {record['epoch']:.2f} ep  {losses}{record['loss_class']:.3f})  "
        f"lr {record['lr']:.2e}  {record['images_per_second']:.1f} img/s{wait}"
    )


def duration(seconds: float) -> str:
    """Return a duration for a sentence: 40 s, 6 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def step_time(seconds: float) -> str:
    """Return the pace of a run: 2.1 s per step, or 40 steps per second."""
    return f"{seconds:.2g} s per step" if seconds >= 0.1 else f"{1 / seconds:.0f} steps per second"
