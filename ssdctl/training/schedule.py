"""Lengths and intervals of a run: `3` or `3ep` in epochs, `300st` in steps, `10min` in minutes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.config import TrainConfig


class Every(NamedTuple):
    """An interval between two actions: optimizer steps, or seconds.

    Steps are fractional, so that the n-th action is at the end of the n-th epoch without drift:
    95 images in batches of 4 end their epochs at steps 23, 47, 71.
    """

    steps: Fraction | None
    seconds: float | None

    def after(self, step: int) -> int | None:
        """Return the first later step with which a period ends, rounded down; None for seconds."""
        if self.steps is None:
            return None
        return math.floor(math.ceil((step + 1) / self.steps) * self.steps)

    def is_due(self, step: int) -> bool:
        """Return whether a period ends with this step; never for seconds."""
        return self.after(step - 1) == step


def split_duration(text: str) -> tuple[float, str]:
    """Parse a duration: `3` -> (3.0, "ep"); `300st` -> (300.0, "st"); `10min` -> (10.0, "min")."""
    for unit in ("ep", "st", "min"):
        if text.endswith(unit):
            return float(text.removesuffix(unit)), unit
    return float(text), "ep"


def check_warmup(config: TrainConfig) -> None:
    """Check a warm-up that the user chose, whatever the dataset is.

    Raises:
        UsageError: It is longer than the recipe; or it has no unit and, as epochs, ends after a
            decay: other programs count iterations.
    """
    value, unit = split_duration(config.warmup)
    steps = f"--warmup {value:.0f}st if these are iterations, as in NVIDIA's program"
    if unit == "ep" and value > config.epochs:
        hint = steps if value.is_integer() else "give it in steps, as in --warmup 300st"
        raise UsageError(f"a warm-up of {value:g} epochs: the run has {config.epochs}", hint=hint)
    decay = min(config.decay_epochs, default=value)
    if config.warmup.isdecimal() and value > decay:
        raise UsageError(
            f"a warm-up of {value:g} epochs ends after the decay at epoch {decay:g}",
            hint=f"{steps}; --warmup {value:.0f}ep if they are epochs",
        )
