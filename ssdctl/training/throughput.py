"""Measure images per second and the time waiting for images; evaluations and saves excluded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from ssdctl.training.schedule import TrainSchedule

INPUT_BOUND_WAIT = 0.2  # fraction of the time spent waiting for images
WARM_UP_LAPS = 2  # the first ones fill buffers, compile and tune


class Lap(NamedTuple):
    """The steps since the previous lap."""

    images_per_second: float
    data_wait: float  # fraction of the time


class ThroughputMeter:
    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._started = self._lap_began = time.monotonic()
        self._lap_images, self._lap_waited_s = 0, 0.0
        self._spent_s = self._waited_s = 0.0  # over the finished laps
        self._laps = 0
        self._input_bound_laps = 0  # in a row
        self._was_reported = False
        self.images = 0

    def start(self) -> None:
        self._lap_began = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for images."""
        began = time.monotonic()
        yield
        self._lap_waited_s += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._lap_began += time.monotonic() - began

    def step_done(self) -> None:
        self._lap_images += self._global_batch
        self.images += self._global_batch

    def lap(self) -> Lap:
        """End a lap, at a point where the device has finished its steps."""
        now = time.monotonic()
        spent = max(now - self._lap_began, 1e-9)
        lap = Lap(self._lap_images / spent, self._lap_waited_s / spent)
        self._spent_s += spent
        self._waited_s += self._lap_waited_s
        self._laps += 1
        if self._laps > WARM_UP_LAPS:
            self._input_bound_laps += 1
            if lap.data_wait <= INPUT_BOUND_WAIT:
                self._input_bound_laps = 0
        self._lap_began, self._lap_images, self._lap_waited_s = now, 0, 0.0
        return lap

    @property
    def training_s(self) -> float:
        """Seconds of training so far, without the paused blocks."""
        return self._spent_s + max(time.monotonic() - self._lap_began, 0.0)

    def is_input_bound(self) -> bool:
        """Return whether the device waited for the input in the last three laps; True only once."""
        if self._was_reported or self._input_bound_laps < 3:
            return False
        self._was_reported = True
        return True

    @property
    def images_per_second(self) -> float:
        return self.images / self._spent_s if self._spent_s else 0.0

    @property
    def data_wait(self) -> float:
        return self._waited_s / self._spent_s if self._spent_s else 0.0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started


class EpochClock:
    """Times the epochs; the first one of a resumed run counts from the resumption."""

    def __init__(self, plan: TrainSchedule, step: int, throughput: ThroughputMeter) -> None:
        self._plan = plan
        self._throughput = throughput
        self._began, self._training_s, self._images = time.monotonic(), 0.0, 0
        self.rewind(step)

    def rewind(self, step: int) -> None:
        self._done = self._plan.epochs_ended(step)

    def ended(self, step: int) -> dict[str, float] | None:
        """Return the duration and the rate of the epoch if it ended with `step`; else None."""
        done = self._plan.epochs_ended(step)
        if done == self._done:
            return None
        now, meter = time.monotonic(), self._throughput
        training_s, images = meter.training_s, meter.images
        rate = (images - self._images) / max(training_s - self._training_s, 1e-9)
        duration_s = now - self._began
        self._done, self._began = done, now
        self._training_s, self._images = training_s, images
        return {"duration_s": round(duration_s, 3), "images_per_second": round(rate, 3)}
