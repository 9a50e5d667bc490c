"""Record steps, measure the pace of training, and profile steps.

`--profile FIRST,LAST` writes RUN/profile/trace.json, a Chrome trace (ui.perfetto.dev), and
table.txt, the slowest kernels and waits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ssdctl.device import Device
from ssdctl.distributed import Ranks
from ssdctl.files import atomic_write, write_text
from ssdctl.training.observers import Epoch, Step, StepMetrics
from ssdctl.training.step import NonFiniteGuard, StepResult
from ssdctl.training.step_input import BadImages

if TYPE_CHECKING:
    from ssdctl.data.store import Split
    from ssdctl.device import Device
    from ssdctl.distributed import Ranks
    from ssdctl.input.batch import Batch
    from ssdctl.runs.metrics import Record
    from ssdctl.training.plan import Plan

INPUT_BOUND_WAIT = 0.2  # fraction of the time spent waiting for images
INPUT_BOUND_LAPS = 3  # in a row
WARM_UP_LAPS = 2  # the first ones fill buffers, compile and tune
log = logging.getLogger(__name__)
ROWS = 40
WAIT = "wait: "  # prefix of the loop's waits


class Lap(NamedTuple):
    """The steps since the previous lap."""

    images_per_second: float
    data_wait: float  # fraction of the time
    is_input_bound: bool  # the device waited for the input in the last laps; true only once


class ThroughputMeter:
    """Measures images per second and the time waiting for images, without evaluations and saves."""

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._started = self._lap_began = self._marked = time.monotonic()
        self.images = self._lap_images = self._timed_images = 0
        self._spent_s = self._waited_s = 0.0  # over the finished laps, as the timed images
        self._lap_waited_s = 0.0
        self._laps = self._slow_laps = 0
        self._was_input_bound = False

    def start(self) -> None:
        """Continue the lap; the time since the mark does not count."""
        self._shift(time.monotonic() - self._marked)

    def mark(self) -> None:
        """Remember the time up to which images and waits are counted; the loop may be left then."""
        self._marked = time.monotonic()

    def _shift(self, seconds: float) -> None:
        self._lap_began += seconds
        self._marked += seconds

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for images."""
        began = time.monotonic()
        yield
        self.mark()
        self._lap_waited_s += self._marked - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._shift(time.monotonic() - began)  # it may be between two loops

    def step_done(self) -> None:
        self._lap_images += self._global_batch
        self.images += self._global_batch
        self.mark()

    def lap(self) -> Lap:
        """End a lap, at a point where the device has finished its steps."""
        now = time.monotonic()
        spent = max(now - self._lap_began, 1e-9)
        rate, data_wait = self._lap_images / spent, self._lap_waited_s / spent
        self._spent_s += spent
        self._waited_s += self._lap_waited_s
        self._timed_images += self._lap_images
        self._laps += 1
        is_slow = self._laps > WARM_UP_LAPS and data_wait > INPUT_BOUND_WAIT
        self._slow_laps = self._slow_laps + 1 if is_slow else 0
        is_input_bound = self._slow_laps == INPUT_BOUND_LAPS and not self._was_input_bound
        self._was_input_bound |= is_input_bound
        self._lap_began = self._marked = now
        self._lap_images, self._lap_waited_s = 0, 0.0
        return Lap(rate, data_wait, is_input_bound)

    @property
    def training_s(self) -> float:
        """Seconds of training so far, without the paused blocks."""
        return self._spent_s + max(time.monotonic() - self._lap_began, 0.0)

    @property
    def images_per_second(self) -> float:
        """The rate of the finished laps; before the first one ends, of the steps so far."""
        if self._spent_s:
            return self._timed_images / self._spent_s
        return self._lap_images / max(self._marked - self._lap_began, 1e-9)

    @property
    def data_wait(self) -> float:
        if self._spent_s:
            return self._waited_s / self._spent_s
        return self._lap_waited_s / max(self._marked - self._lap_began, 1e-9)

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started


class EpochTimer:
    """Measures epochs; the first one begins at this start."""

    def __init__(self, plan: Plan, meter: ThroughputMeter, step: int) -> None:
        self._plan, self._meter = plan, meter
        self._began = time.monotonic(), 0.0, 0  # with seconds and images of training
        self.rewind(step)

    def rewind(self, step: int) -> None:
        self._ended = self._plan.epochs_ended(step)

    def ended_at(self, step: int) -> Epoch | None:
        """Return the epoch that ended with a step, if any."""
        ended = self._plan.epochs_ended(step)
        if ended == self._ended:
            return None
        now = time.monotonic(), self._meter.training_s, self._meter.images
        duration_s, training_s, images = (
            new - old for new, old in zip(now, self._began, strict=True)
        )
        self._ended, self._began = ended, now
        return Epoch(step, ended, round(duration_s, 3), round(images / max(training_s, 1e-9), 3))


class StepRecorder:
    """Makes the records of steps. Those at log points have metrics, which wait for the device.

    Args:
        split: The training images.
        memory_hints: Returns a context that explains a full memory.
    """

    def __init__(
        self,
        plan: Plan,
        split: Split,
        device: Device,
        ranks: Ranks,
        memory_hints: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._plan, self._ids, self._device, self._ranks = plan, split.image_ids, device, ranks
        self._memory_hints = memory_hints
        self.meter = ThroughputMeter(plan.global_batch_size)
        self.guard = NonFiniteGuard(plan.config.train.on_nonfinite, ranks)
        self.bad_images = BadImages(plan.images, ranks)
        self._pending: Step | None = None  # the last step, unless it was at a log point

    def record(
        self,
        step: int,
        began: float,
        batches: Sequence[Batch],
        result: StepResult,
        *,
        is_saved: bool,
    ) -> Step:
        """Return the record of a step that began at a time, in seconds since 1970.

        Args:
            is_saved: Report what went wrong so far: a run that resumes here does not repeat it.
        """
        plan, log_every = self._plan, self._plan.config.train.log_every
        self.bad_images.add(batches)
        ids = [int(i) for batch in batches for i in self._ids[batch.rows]]
        self.guard.watch(step, result.is_bad, ids)
        self.meter.step_done()
        record = Step(step, round(plan.epoch(step), 4), plan.lr(step - 1), began, result)
        if step == plan.total_steps or (log_every and step % log_every == 0):
            self._pending = None
            return self._with_metrics(record)
        self._pending = record
        return self._with_problems(record) if is_saved else record

    def rewind(self, past: Iterable[Record]) -> None:
        self._pending = None
        self.bad_images.start(past)

    def take_pending(self) -> Step | None:
        """Return the last step with metrics; None if it was returned with metrics before."""
        record, self._pending = self._pending, None
        return None if record is None else self._with_metrics(record)

    def _with_problems(self, record: Step) -> Step:
        return record._replace(bad_images=self.bad_images.report(), skipped=self.guard.check())

    def _with_metrics(self, record: Step) -> Step:
        with torch.profiler.record_function("wait: device, at a log point"), self._memory_hints():
            values = record.result.read(self._ranks)
        lap = self.meter.lap()
        metrics = StepMetrics(
            loss=values["loss"],
            loss_box=values["loss_box"],
            loss_class=values["loss_class"],
            lr=record.lr,
            images_per_second=round(lap.images_per_second, 3),
            grad_norm=values["grad_norm"],
            data_wait=round(lap.data_wait, 4),
            memory_bytes=self._device.peak_memory_bytes(),
        )
        record = record._replace(metrics=metrics, is_input_bound=lap.is_input_bound)
        return self._with_problems(record)


class StepProfiler:
    """Profiles a range of steps.

    Args:
        steps: `FIRST,LAST` as on the command line, both included; None profiles nothing.
        ranks: Each rank writes its own files; the rank is in the names of all but the first.
    """

    def __init__(self, steps: str | None, folder: Path, device: Device, ranks: Ranks) -> None:
        first, last = (int(part) for part in steps.split(",")) if steps else (0, -1)
        self._steps = range(first, last + 1)
        self._folder = folder
        self._suffix = "" if ranks.is_main else f"-rank{ranks.rank}"
        self._device = device
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if step in self._steps and self._profiler is None:
            self._device.synchronize()  # exclude earlier work
            supported = torch.profiler.supported_activities()
            used = [a for a in supported if a.name.lower() in {"cpu", self._device.name}]
            self._profiler = torch.profiler.profile(activities=used)
            self._profiler.start()
            self._profiled: list[int] = []
            atexit.register(self.close)

    def after(self, step: int, *, is_last: bool) -> None:
        """Stop after the last step of the range, or of the run, and write the files."""
        if self._profiler is None:
            return
        self._profiled.append(step)
        if is_last or step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop, and write the files of the steps so far; a profiler that runs crashes the exit."""
        if self._profiler is None:
            return
        atexit.unregister(self.close)
        profiler, self._profiler = self._profiler, None
        self._steps = range(0)  # a loop that is entered again keeps the files
        self._device.synchronize()
        profiler.stop()
        if not self._profiled:
            return
        trace = self._folder / f"trace{self._suffix}.json"
        with atomic_write(trace) as file:
            profiler.export_chrome_trace(file.name)
        averages = profiler.key_averages()
        on_device = any(row.self_device_time_total for row in averages)
        key = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=70)
        lines = [table, "Waits of the host:", *waits(averages)]
        write_text(self._folder / f"table{self._suffix}.txt", "\n".join(lines) + "\n")
        text = "profile of steps %d to %d: %s, and table.txt next to it"
        log.info(text, self._profiled[0], self._profiled[-1], trace)


def waits(averages: Iterable[Any]) -> list[str]:
    """Return a line for each wait of the loop, in ms.

    The GPU's time of a wait is a separate row of the same name, without host time.
    """
    return [
        f"  {row.key:<40}{row.cpu_time_total / 1000:>12.3f} ms in {row.count}"
        for row in averages
        if row.key.startswith(WAIT) and row.cpu_time_total > 0
    ]
