"""Show the progress of a run: facts at its start, a redrawn line, and lines that stay."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ssdctl.runtime.progress import (
    Progress,
    can_redraw,
    duration,
    progress_bar,
    step_time,
    without_progress,
)
from ssdctl.training import description
from ssdctl.training.observers import (
    Detected,
    End,
    Epoch,
    Observer,
    Scored,
    Start,
    Step,
    StepMetrics,
)

if TYPE_CHECKING:
    from ssdctl.training.plan import Plan

log = logging.getLogger(__name__)
FIRST_STEPS = 3  # before the time left is known; the first step also allocates
WINDOW_S = 20.0  # the pace is that of the last seconds
SETTLED_S = 8.0  # the shortest time after which a pace is compared
SAMPLE_S = 0.1  # between two positions that are kept
EVALUATION_COST = 0.4  # an image's, in trained ones: the first estimate; measured on two cores
SLOWER = 1.7  # times the first pace: worth telling
STARVED = 0.2  # fraction of the time spent waiting for images: worth telling
FEWEST_BAR_COLUMNS = 10
EPOCH_LINES_S = 1.0  # the shortest time between two lines about epochs


class Pace:
    """The position, pace and time left of a run.

    Args:
        step: The step from which it continues.
        val_images: Images of an evaluation.
        clock: Returns seconds.
    """

    def __init__(
        self,
        plan: Plan,
        step: int,
        val_images: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._val_images, self._clock = plan, val_images, clock
        self._evaluations = plan.evaluations_after(step) if val_images else []
        self.step = step
        self.last: StepMetrics | None = None
        self._num_steps = 0  # that this process trained
        self._recent: deque[tuple[float, int]] = deque()  # time and step
        self._step_s: float | None = None  # seconds per step; None: not known yet
        self._told_step_s: float | None = None
        self._evaluation_began: float | None = None
        self._evaluation_s: float | None = None
        self._end: float | None = None  # when the run ends, by the clock

    def step_done(self, step: int) -> None:
        self.step = step
        self._measure(self._clock(), step)
        self._estimate_end()

    def evaluation_begins(self) -> None:
        self._evaluation_began = self._clock()

    def evaluation_ends(self) -> None:
        now = self._clock()
        if self._evaluation_began is not None:
            self._evaluation_s, self._evaluation_began = now - self._evaluation_began, None
        self._recent = deque([(now, self.step)])
        self._estimate_end()

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

    def _estimate_end(self) -> None:
        plan, step_s, evaluation_s = self._plan, self._step_s, self._evaluation_s
        if step_s is None:
            return
        if evaluation_s is None:
            evaluation_s = EVALUATION_COST * self._val_images / plan.global_batch_size * step_s
        evaluations = sum(due > self.step for due in self._evaluations)
        left_s = (plan.total_steps - self.step) * step_s + evaluations * evaluation_s
        self._end = self._clock() + left_s

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
        texts = [f"step {self.step:,}/{self._plan.total_steps:,}", *self._facts()]
        while columns < FEWEST_BAR_COLUMNS + sum(len(text) + 2 for text in texts) and texts[1:]:
            texts.pop()
        return "  ".join([f"{texts[0]} |{{bar}}|", *texts[1:]])

    def _facts(self) -> list[str]:
        left = self.time_left()
        facts = [f"{self._plan.epoch(self.step):.2f} ep"]
        facts.append(f"{left} left" if left else "first step...")
        if self._evaluation_began is not None:
            return [*facts, f"evaluating {self._val_images:,} images"]
        if (last := self.last) is None:
            return facts
        facts += [
            f"loss {last.loss:.2f}",
            f"{last.images_per_second:,.1f} img/s",
            f"{last.memory_bytes / 1e9:.1f} GB",
        ]
        if last.data_wait >= STARVED:
            facts.append(f"data wait {last.data_wait:.0%}")
        return facts


class Display(Observer):
    """Shows a run: lines at its start, a redrawn line, permanent lines.

    Args:
        facts: Writes the lines at the start, each a name and a text.
        write: Writes a permanent line in a style: `green`, `bold` or none.
        progress: Shows a bar while the dataset is prepared.
        is_live: Redraw a line.
        has_steps: Also write the metrics of steps if a line is redrawn.
        is_verbose: Also write the values that a rule chose.
    """

    def __init__(
        self,
        facts: Callable[[Sequence[tuple[str, str]]], None],
        write: Callable[[str, str], None],
        *,
        progress: Progress = without_progress,
        is_live: bool,
        has_steps: bool = False,
        is_verbose: bool = False,
    ) -> None:
        self._facts, self._write, self.progress = facts, write, progress
        self._is_live, self._is_verbose = is_live, is_verbose
        self._has_steps = has_steps or not is_live
        self._ap: float | None = None  # the last evaluation's
        self._best_ap: float | None = None
        self._epoch_shown_at = -EPOCH_LINES_S
        self._epoch_metrics: StepMetrics | None = None
        self._stack = contextlib.ExitStack()
        self._bar: Any = None

    def on_start(self, start: Start) -> None:
        plan, step = start.plan, start.step
        self._pace = Pace(plan, step, start.val_images)
        self._best_ap = start.best_evaluation().get("AP")
        self._facts(description.facts_of_start(start))
        if self._is_verbose and (details := description.details(plan)):
            self._write(details, "")
        if self._is_live and step < plan.total_steps:
            bar = progress_bar(
                total=plan.total_steps,
                initial=step,
                bar_format=self._pace.bar_format(shutil.get_terminal_size().columns),
            )
            self._bar = self._stack.enter_context(bar)

    def on_step(self, step: Step) -> None:
        self._pace.step_done(step.step)
        self._redraw()
        self._write_notice()
        if step.metrics is None:
            return
        self._pace.last = step.metrics
        if self._has_steps:
            left = self._pace.time_left()
            self._write(_line(step, step.metrics) + (f"  {left} left" if left else ""), "")

    def on_evaluation_start(self, step: int) -> None:
        self._pace.evaluation_begins()
        self._redraw(at_once=True)

    def on_detections(self, detected: Detected) -> None:
        self._pace.evaluation_ends()
        self._redraw()
        self._write_notice()

    def on_epoch(self, epoch: Epoch) -> None:
        last, now = self._pace.last, time.monotonic()
        has_old_loss = last is not None and last is self._epoch_metrics
        if has_old_loss or now - self._epoch_shown_at < EPOCH_LINES_S:
            return
        self._epoch_shown_at, self._epoch_metrics = now, last
        loss = f", loss {last.loss:.3f}" if last else ""
        self._write(
            f"step {epoch.step:,}  epoch {epoch.epoch} done in {duration(epoch.duration_s)}, "
            f"{epoch.images_per_second:.1f} img/s{loss}",
            "",
        )

    def on_evaluation(self, scored: Scored) -> None:
        metrics, before = scored.evaluation.metrics, self._ap
        position, ap = f"step {scored.step:,}", metrics["AP"]
        self._ap = ap
        if ap < 0:
            text = f"{position}  no AP: the validation split has no annotated objects"
            self._write(text, "bold")
            return
        change = "" if before is None or before < 0 else f" ({ap - before:+.3f})"
        texts = [position, f"AP {ap:.3f}{change}"]
        texts += [f"{name} {metrics[name]:.3f}" for name in ("AP50", "AP75")]
        if "loss" in scored.losses:
            texts.append(f"val loss {scored.losses['loss']:.2f}")
        is_best = self._best_ap is None or ap > self._best_ap
        if is_best:
            self._best_ap = ap
            texts.append("best")
        self._write("  ".join(texts), "green" if is_best else "bold")

    def on_end(self, end: End) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def _redraw(self, *, at_once: bool = False) -> None:
        if self._bar is None:
            return
        self._bar.bar_format = self._pace.bar_format(shutil.get_terminal_size().columns)
        self._bar.update(self._pace.step - self._bar.n)
        if at_once:
            self._bar.refresh()

    def _write_notice(self) -> None:
        if notice := self._pace.notice():
            self._write(notice, "")


def log_display(*, progress: bool) -> Display:
    """Return a display that logs, with a progress bar if `progress` and where one can be drawn."""

    def facts(rows: Sequence[tuple[str, str]]) -> None:
        for row in rows:
            log.info("%s: %s", *row)

    return Display(
        facts,
        lambda text, _style: log.info("%s", text),
        progress=progress_bar if progress else without_progress,
        is_live=progress and can_redraw(),
        has_steps=True,
    )


def _line(step: Step, metrics: StepMetrics) -> str:
    wait = f"  data wait {metrics.data_wait:.0%}" if metrics.data_wait >= 0.05 else ""
    losses = f"loss {metrics.loss:.3f} (box {metrics.loss_box:.3f}, class "
    return (
        f"step {step.step:,}  {step.epoch:.2f} ep  {losses}{metrics.loss_class:.3f})  "
        f"lr {metrics.lr:.2e}  {metrics.images_per_second:.1f} img/s{wait}"
    )
