"""Convert durations to steps, and a step to its learning rate. Torch-free.

With `images` in the dataset and a global batch of G, epoch e ends at step e * images / G, rounded
down: samples form one endless stream (docs/recipes.md), so an epoch need not end with a step.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from ssdctl.errors import UsageError
from ssdctl.input.batch import num_background
from ssdctl.model.backbones import find_backbone

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import Checkpoint
    from ssdctl.config import TrainConfig
    from ssdctl.config.sections import SettledTrainConfig

COSINE_FLOOR = 0.01  # Habana-TF adds it to the cosine: 1.01 before the decay, 0.01 at the end
DECAY_FACTOR = 0.1


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


class TrainSchedule(NamedTuple):
    """Steps and learning rate of a run, as `train --dry-run --json` prints them."""

    images: int  # of an epoch
    background: int  # of them, without objects
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    peak_lr: float
    decay_steps: tuple[int, ...]
    is_cosine: bool
    batch_size: int  # per rank and micro-batch

    def as_json(self) -> dict[str, Any]:
        fields = self._asdict()
        del fields["is_cosine"], fields["batch_size"]
        return {**fields, "decay_steps": list(self.decay_steps)}

    def lr(self, step: int) -> float:
        """Return the learning rate of a step; the first step is 0.

        The warm-up is linear from 0, so the first step of a warm-up changes no weight.
        """
        if step < self.warmup_steps:
            plateau = self.peak_lr * (1 + COSINE_FLOOR * self.is_cosine)
            return plateau * step / self.warmup_steps
        if self.is_cosine:
            start, end = self.decay_steps
            progress = min(max((step - start) / max(end - start, 1), 0.0), 1.0)
            return self.peak_lr * (0.5 * (1 + math.cos(math.pi * progress)) + COSINE_FLOOR)
        return self.peak_lr * DECAY_FACTOR ** sum(step >= decay for decay in self.decay_steps)

    def step_of(self, checkpoint: Checkpoint) -> int:
        """Return a checkpoint's step; with another global batch, that with as many samples."""
        if checkpoint.global_batch == self.global_batch_size:
            return checkpoint.step
        return checkpoint.samples_seen // self.global_batch_size

    def epoch(self, step: int) -> float:
        return step * self.global_batch_size / self.images

    def epochs_ended(self, step: int) -> int:
        """Return the number of epochs that ended with `step` or before it."""
        if step < 1:
            return 0
        return -(-(step + 1) * self.global_batch_size // self.images) - 1


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


def make_plan(config: SettledTrainConfig, images: int, world_size: int) -> TrainSchedule:
    """Compute the schedule of a run. `steps` ends it earlier and changes nothing before.

    Args:
        images: Training images with objects.

    Raises:
        UsageError: The warm-up is longer than the recipe.
    """
    global_batch = config.batch_size * world_size * config.accumulate
    background = num_background(images, config.background)
    images += background
    total, warmup = length_and_warmup(config, images, world_size)
    if warmup > total:
        value, unit = split_duration(config.warmup)
        hint = f"give it in steps: --warmup {max(total // 10, 1)}st"
        if unit == "ep" and value.is_integer() and value <= total:
            hint = f"--warmup {value:.0f}st if these are iterations, as in NVIDIA's program"
        raise UsageError(
            f"a warm-up of {config.warmup} is {warmup} steps, the run has {total}", hint=hint
        )
    return TrainSchedule(
        images=images,
        background=background,
        global_batch_size=global_batch,
        steps_per_epoch=max(images // global_batch, 1),
        total_steps=min(total, config.steps or total),
        warmup_steps=warmup,
        peak_lr=config.lr * global_batch / 32,
        decay_steps=tuple(int(epoch * images / global_batch) for epoch in config.decay_epochs),
        is_cosine=config.lr_decay == "cosine",
        batch_size=config.batch_size,
    )


def length_and_warmup(config: SettledTrainConfig, images: int, world_size: int) -> tuple[int, int]:
    """Return the steps of all epochs and of the warm-up, whatever `steps` is."""
    global_batch = config.batch_size * world_size * config.accumulate
    value, unit = split_duration(config.warmup)
    warmup = int(value if unit == "st" else value * images / global_batch)
    return max(int(config.epochs * images / global_batch), 1), warmup


def split_duration(text: str) -> tuple[float, str]:
    """Parse a duration: `3` -> (3.0, "ep"); `300st` -> (300.0, "st"); `10min` -> (10.0, "min")."""
    for unit in ("ep", "st", "min"):
        if text.endswith(unit):
            return float(text.removesuffix(unit)), unit
    return float(text), "ep"


def every(text: str, plan: TrainSchedule) -> Every:
    value, unit = split_duration(text)
    if unit == "min":
        return Every(None, value * 60)
    steps = Fraction(int(value))
    if unit == "ep":
        steps = Fraction(str(value)) * plan.images / plan.global_batch_size
    return Every(max(steps, Fraction(1)), None)


def next_evaluation(config: TrainConfig, plan: TrainSchedule, step: int) -> int:
    """Return the first step after `step` that is evaluated; the last one always is."""
    steps = [plan.total_steps]
    steps += [max(int(e * plan.images / plan.global_batch_size), 1) for e in config.eval_at]
    if config.eval_every and (due := every(config.eval_every, plan).after(step)) is not None:
        steps.append(due)
    return min((s for s in steps if s > step), default=plan.total_steps)


def checkpoint_bytes(backbone: str, num_classes: int, config: TrainConfig) -> int:
    """Return the approximate size of a checkpoint: weights, EMA, optimizer state."""
    copies = 1 + bool(config.ema) + (2 if config.optimizer == "adamw" else 1)
    shared, per_class = find_backbone(backbone).PARAMETERS
    return 4 * copies * (shared + num_classes * per_class)
