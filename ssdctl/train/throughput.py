"""How fast a run is, and what it waits for. Evaluations and saves are no training time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

STARVING = 0.2  # share of the time spent waiting for images from which on the user should know
LAPS_TO_SETTLE = 2  # the first ones fill buffers, compile and tune


class Lap(NamedTuple):
    """The steps since the lap before."""

    images_per_second: float
    data_wait: float  # share of the time


class ThroughputMeter:
    """A stopwatch for a loop of steps.

    Args:
        global_batch: Images in a step.
    """

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._born = self._lap_began = time.monotonic()
        self._lap_images, self._lap_waited_s = 0, 0.0
        self._spent_s = self._waited_s = 0.0  # over the laps that are done
        self._laps = 0
        self._starved: list[bool] = []
        self._has_told = False
        self.images = 0

    def start(self) -> None:
        """The first step is about to begin."""
        self._lap_began = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for images."""
        began = time.monotonic()
        yield
        self._lap_waited_s += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block is no training."""
        began = time.monotonic()
        yield
        self._lap_began += time.monotonic() - began

    def step_done(self) -> None:
        self._lap_images += self._global_batch
        self.images += self._global_batch

    def lap(self) -> Lap:
        """End a lap, at a point where the device has done its steps."""
        now = time.monotonic()
        spent = max(now - self._lap_began, 1e-9)
        lap = Lap(self._lap_images / spent, self._lap_waited_s / spent)
        self._spent_s += spent
        self._waited_s += self._lap_waited_s
        self._laps += 1
        if self._laps > LAPS_TO_SETTLE:
            self._starved = [*self._starved[-2:], lap.data_wait > STARVING]
        self._lap_began, self._lap_images, self._lap_waited_s = now, 0, 0.0
        return lap

    def is_input_bound(self) -> bool:
        """Whether the input has kept the device waiting three laps long; true once."""
        if self._has_told or len(self._starved) < 3 or not all(self._starved):
            return False
        self._has_told = True
        return True

    @property
    def images_per_second(self) -> float:
        """Over all laps."""
        return self.images / self._spent_s if self._spent_s else 0.0

    @property
    def data_wait(self) -> float:
        """Share of the training time that went by waiting for images."""
        return self._waited_s / self._spent_s if self._spent_s else 0.0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._born
