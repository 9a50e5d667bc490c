"""The rules for few images and for fine-tuning, which replace what the user left open.

The default preset is a recipe for COCO: on 9 images it takes 18 steps. docs/recipes.md describes
the rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from ssdctl.config.settings import FINE_TUNING, SMALL_DATA, Config, Source
from ssdctl.input.batch import num_background

FEW_IMAGES = 2500  # with fewer, 65 epochs at batch 32 are less than 5,000 steps
REFERENCE_BATCH = 8  # `Rule.peak_lr` is for this global batch
HIGHEST_LR = 2e-3  # AdamW, large batches
EVALUATIONS = 10
STEPS_BETWEEN_EVALUATIONS = 50  # fewest, before rounding
SMALL_BATCH = 8  # images per device; at 8 and above, updating batch-norm statistics was fine

# Settings of `train` that are only replaced together, if the user chose none of them.
OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
DECAY = ("lr_decay", "decay_epochs")


class Rule(NamedTuple):
    """What replaces the recipe's values."""

    source: Source
    fewest_samples: int  # images trained on, repetitions included
    fewest_epochs: int
    peak_lr: float  # at REFERENCE_BATCH; grows with the batch's square root


FEW = Rule(SMALL_DATA, fewest_samples=8000, fewest_epochs=20, peak_lr=1.4e-3)
TUNED = Rule(FINE_TUNING, fewest_samples=3000, fewest_epochs=10, peak_lr=1e-3)


def adapt_to_data(
    config: Config, images: int, world_size: int, background: float = 0.0
) -> tuple[Config, str | None]:
    """Apply the rule for few images or for fine-tuning to what the user left at its default.

    A preset that the user names is used as it is. Settings that belong together are only changed
    together: the optimizer with its rate and weight decay, the kind of decay with its epochs.

    Args:
        images: Training images with objects.
        background: Fraction of images without objects that the dataset offers.

    Returns:
        The config, and a line with the rule's name, reason and changes; None without changes.
    """
    train = config.train
    if config.is_chosen("train.preset") or images >= FEW_IMAGES or train.fake_data:
        return config, None
    rule = FEW if train.init is None else TUNED
    values = _values(config, images, world_size, rule, background)
    if not values:
        return config, None
    for name, value in values.items():
        config = config.with_value(f"train.{name}", value, rule.source)
    kind = "fine-tuning on" if train.init is not None else "only"
    changes = ", ".join(f"{name} {_text(value)}" for name, value in values.items())
    line = f"{rule.source} ({kind} {images:,} training images): {changes}"
    return config, line


def _values(
    settings: Config, images: int, world_size: int, rule: Rule, background: float
) -> dict[str, Any]:
    """Return the new values of those settings that the user did not set."""
    config = settings.train
    values: dict[str, Any] = {}

    def is_open(*names: str) -> bool:
        return not settings.is_chosen(*(f"train.{name}" for name in names))

    per_batch_size, batch_size = world_size * config.accumulate, int(config.batch_size)
    if is_open("batch_size"):
        fewest = 2 if settings.model.extra_norm == "batch" else 1
        values["batch_size"] = batch_size = max(REFERENCE_BATCH // per_batch_size, fewest)
    global_batch = batch_size * per_batch_size

    if background and is_open("background"):
        values["background"] = background
    else:
        background = config.background
    epoch_images = images + num_background(images, background)
    epochs = config.epochs
    if is_open("epochs"):
        samples = max(rule.fewest_samples, rule.fewest_epochs * images)
        run_epochs = (config.steps or 0) * global_batch / epoch_images
        values["epochs"] = epochs = math.ceil(max(samples / images, run_epochs))
    if is_open(*OPTIMIZER):
        peak = min(rule.peak_lr * math.sqrt(global_batch / REFERENCE_BATCH), HIGHEST_LR)
        values |= {
            "optimizer": "adamw",
            "weight_decay": 0.01,
            "lr": float(f"{peak * 32 / global_batch:.3g}"),
        }
    values |= _schedule(config.steps, epochs, epoch_images, global_batch, is_open)
    if rule is TUNED and batch_size < SMALL_BATCH and is_open("freeze_norm"):
        values["freeze_norm"] = True
    return values


def short_warmup(steps: int, divisor: int) -> int:
    """Return a share of a run's steps, at least one: its rate is 0. A single step has none."""
    return min(max(steps // divisor, 1), steps - 1)


def _schedule(
    most_steps: int | None,
    epochs: float,
    epoch_images: int,
    global_batch: int,
    is_open: Callable[..., bool],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    steps, end = max(int(epochs * epoch_images / global_batch), 1), float(epochs)
    run_steps = min(steps, most_steps or steps)
    if run_steps < steps:  # the schedule ends with the run; rounded up to the end of a step
        end = math.ceil(1e4 * run_steps * global_batch / epoch_images) / 1e4
    if is_open("warmup"):
        values["warmup"] = f"{short_warmup(run_steps, 20)}st"
    if is_open(*DECAY):
        values |= {"lr_decay": "cosine", "decay_epochs": (round(0.2 * end, 3), end)}
    if is_open("eval_every"):
        count = min(run_steps // STEPS_BETWEEN_EVALUATIONS, EVALUATIONS)
        if count > 1:  # rounded up: the last one is with the last step
            values["eval_every"] = f"{math.ceil(run_steps / count)}st"
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
