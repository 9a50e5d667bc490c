"""Adapt the default recipe to few training pictures and to fine-tuning. Torch-free.

The default preset is a recipe for COCO: on 9 pictures it takes 18 steps. Below `FEW_IMAGES`
pictures the rules here replace those of its values that the user did not set. A preset that the
user names is used as it is. docs/recipes.md describes the rules.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ssdctl.config.resolve import Resolved
from ssdctl.config.sources import Kind, Source

FEW_IMAGES = 2500  # with fewer, 65 epochs at batch 32 are less than 5,000 steps
REFERENCE_BATCH = 8  # `Rule.peak_lr` is for this global batch
HIGHEST_LR = 2e-3  # of AdamW, for large batches
EVALUATIONS = 10
FEWEST_STEPS_BETWEEN_EVALUATIONS = 50
SMALL_BATCH = 8  # images per device; at 8, updating batch norm's statistics did no harm


class Rule(NamedTuple):
    """What replaces the recipe's values."""

    name: str
    fewest_samples: int  # images trained on, repetitions included
    fewest_epochs: int
    peak_lr: float  # at REFERENCE_BATCH; grows with the batch's square root


SMALL_DATA = Rule("small-data rule", fewest_samples=8000, fewest_epochs=20, peak_lr=1.4e-3)
FINE_TUNING = Rule("fine-tuning rule", fewest_samples=3000, fewest_epochs=10, peak_lr=1e-3)


class Adapted(NamedTuple):
    """The settings of a run, and the rule that changed some of them."""

    resolved: Resolved
    rule: str | None  # one line: name, reason, changed values; None if the recipe is unchanged


def adapt_to_data(resolved: Resolved, images: int, world_size: int) -> Adapted:
    """Apply the rule for few pictures to the settings that the user left at their defaults.

    Settings that belong together are only changed together: the optimizer with its rate and weight
    decay, the kind of decay with its epochs.

    Args:
        resolved: The settings, with the source of each.
        images: Number of training images.
        world_size: Number of ranks.
    """
    config = resolved.config.train
    if resolved.is_chosen("train.preset") or images >= FEW_IMAGES or config.fake_data:
        return Adapted(resolved, None)
    rule = SMALL_DATA if config.init is None else FINE_TUNING
    values = _values(resolved, rule, images, world_size)
    for name, value in values.items():
        resolved = resolved.with_value(f"train.{name}", value, Source(Kind.RULE, rule.name))
    if not values:
        return Adapted(resolved, None)
    kind = "fine-tuning on" if config.init is not None else "only"
    changes = ", ".join(f"{name} {_text(value)}" for name, value in values.items())
    line = f"{rule.name} ({kind} {images:,} training images): {changes}"
    return Adapted(resolved, line)


def _values(resolved: Resolved, rule: Rule, images: int, world_size: int) -> dict[str, Any]:
    """Return the new values of those settings that the user did not set."""
    config = resolved.config.train
    values: dict[str, Any] = {}

    def is_open(*names: str) -> bool:
        return not resolved.is_chosen(*(f"train.{name}" for name in names))

    assert isinstance(config.batch_size, int)
    per_batch_size, batch_size = world_size * config.accumulate, config.batch_size
    if is_open("batch_size"):
        fewest = 2 if resolved.config.model.extra_norm == "batch" else 1
        values["batch_size"] = batch_size = max(REFERENCE_BATCH // per_batch_size, fewest)
    global_batch = batch_size * per_batch_size

    epochs = config.epochs
    if is_open("epochs"):
        samples = max(rule.fewest_samples, rule.fewest_epochs * images)
        samples = max(samples, (config.steps or 0) * global_batch)
        values["epochs"] = epochs = math.ceil(samples / images)
    if is_open("optimizer", "lr", "momentum", "weight_decay"):
        peak = min(rule.peak_lr * math.sqrt(global_batch / REFERENCE_BATCH), HIGHEST_LR)
        values |= {
            "optimizer": "adamw",
            "weight_decay": 0.01,
            "lr": float(f"{peak * 32 / global_batch:.3g}"),
        }
    steps, end = max(int(epochs * images / global_batch), 1), float(epochs)
    run_steps = min(steps, config.steps or steps)
    if run_steps < steps:  # the schedule ends with the run; rounded up to the end of a step
        end = math.ceil(1e4 * run_steps * global_batch / images) / 1e4
    if is_open("warmup"):
        values["warmup"] = f"{max(run_steps // 20, 1)}st"
    if is_open("lr_decay", "decay_epochs"):
        values |= {"lr_decay": "cosine", "decay_epochs": (round(0.2 * end, 3), end)}
    if is_open("eval_every", "eval_at"):
        interval = max(run_steps // EVALUATIONS, FEWEST_STEPS_BETWEEN_EVALUATIONS)
        if interval < run_steps:
            values["eval_every"] = f"{interval}st"
    if rule is FINE_TUNING and batch_size < SMALL_BATCH and is_open("freeze_norm"):
        values["freeze_norm"] = True
    return values


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{part:g}" for part in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
