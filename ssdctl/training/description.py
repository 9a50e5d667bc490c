"""Describe a run in a few lines: its data, network, length and recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ssdctl.config import Config
from ssdctl.config.settings import Kind
from ssdctl.data.coco_json import COCO_NUM_CLASSES
from ssdctl.data.store_folder import dataset_folders
from ssdctl.runs.folder import run_dir
from ssdctl.runtime.safe_text import counted, listed
from ssdctl.training.plan import CONTINUED
from ssdctl.training.small_data import short_warmup

if TYPE_CHECKING:
    from ssdctl.training.observers import Start
    from ssdctl.training.plan import Plan

MAX_CLASSES = 8  # that are named
NEARLY_DECAYED = 0.1  # fraction of the peak, at the end of a cosine


def facts_of_start(start: Start) -> list[tuple[str, str]]:
    """Return the lines that the display shows before the first step."""
    devices = "" if start.world_size == 1 else f"{start.world_size} x "
    threads = counted(start.threads, "decode thread")
    device = f"{devices}{start.device}, {start.plan.precision}, {threads}"
    names = [c.name for c in start.train.classes]
    rows = facts(start.plan, names, start.val_images, device, start.step)
    return [*rows.items(), ("run", str(run_dir(start.plan.config)))]


def facts(
    plan: Plan, classes: Sequence[str], val_images: int, device: str, step: int = 0
) -> dict[str, str]:
    """Return the lines about a run, by name, as training and a dry run show them.

    Args:
        classes: The names of the dataset's classes; none if COCO is assumed.
        val_images: That are evaluated.
        device: The text about it.
        step: From which the run continues.
    """
    return {
        "data": _data(plan, classes, val_images),
        "network": _network(plan.config, step),
        "device": device,
        "length": _length(plan, len(plan.evaluations_after(step)) if val_images else 0),
        "recipe": _recipe(plan),
    }


def _data(plan: Plan, classes: Sequence[str], val_images: int) -> str:
    images = counted(plan.images, "training image")
    if plan.config.data.tile:
        images = f"{plan.images:,} training images and tiles"
    if plan.background:
        images += f" ({plan.background:,} without objects)"
    if not classes:
        return f"assumed: COCO, {images}, {COCO_NUM_CLASSES} classes"
    root, _ = dataset_folders(plan.config.data)
    return (
        f"{root.name or root}: {images}, {f'{val_images:,}' if val_images else 'none'} for "
        f"validation; {len(classes)} class{'es' * (len(classes) != 1)}: "
        f"{listed(list(classes), MAX_CLASSES)}"
    )


def _network(config: Config, step: int) -> str:
    if step:
        weights = f"continues from step {step:,}"
    elif config.train.init is not None:
        weights = f"starts from {config.train.init}"
    else:
        name = config.model.weights_name
        weights = "random weights" if name is None else f"backbone weights {name}"
    return f"SSD300 with {config.model.backbone}, {weights}"


def _length(plan: Plan, evaluations: int) -> str:
    epochs = plan.epoch(plan.total_steps)
    epochs_text = f"{epochs:.1f}" if epochs >= 10 else f"{epochs:.2f}"
    steps, images = counted(plan.total_steps, "step"), counted(plan.global_batch_size, "image")
    line = f"{steps} of {images} ({epochs_text} epochs)"
    return f"{line}, {counted(evaluations, 'evaluation')}" if evaluations else line


def _recipe(plan: Plan) -> str:
    config = plan.config.train
    name = plan.rule.partition(" (")[0] if plan.rule else f"preset {config.preset}"
    is_fitted = plan.config.sources["train.decay_epochs"].kind is Kind.RULE
    if is_fitted and config.steps == plan.total_steps:
        name += f", fitted to --steps {config.steps}"
    decay = [step for step in plan.decay_steps if step <= plan.total_steps]
    if plan.is_cosine:
        shape = f"cosine from step {plan.decay_steps[0]:,} to {plan.decay_steps[1]:,}"
    else:
        shape = f"x 0.1 at step {' and '.join(f'{s:,}' for s in decay)}" if decay else "no decay"
    warmup = f"warm-up {counted(plan.warmup_steps, 'step')}, " if plan.warmup_steps else ""
    return f"{name}: {config.optimizer}, learning rate {plan.peak_lr:g}, {warmup}{shape}"


def details(plan: Plan) -> str | None:
    """Return the settings that a rule chose, for -v; None without a rule."""
    preset = plan.config.train.preset
    return plan.rule and f"{plan.rule}; use --preset {preset} for the full COCO recipe"


def _missed(plan: Plan) -> str | None:
    total = plan.total_steps
    if total < plan.warmup_steps:
        return f"the end of its warm-up at step {plan.warmup_steps:,}"
    missed = [f"{step:,}" for step in plan.decay_steps if step > total]
    if plan.is_cosine:
        missed = missed[-1:] if plan.lr(total - 1) > NEARLY_DECAYED * plan.peak_lr else []
    what = "the end of its cosine decay" if plan.is_cosine else "its decay"
    return f"{what} at step {' and '.join(missed)}" if missed else None


def warnings_of_unreached(plan: Plan, step: int) -> list[str]:
    """Return warnings about a schedule that does not fit the run, and about what is not reached.

    It continues from `step`.

    The rules for few images and fine-tuning fit the schedule to --steps, recipes do not.
    """
    config, total = plan.config.train, plan.total_steps
    warnings, missed = list[str](), _missed(plan)
    is_cut = config.steps is not None and config.steps <= total
    if missed and is_cut and not config.fake_data:
        warnings.append(
            f"--steps {total} ends before the learning rate does: {missed} is not reached; "
            "--epochs or --decay-epochs fit the recipe to a short run"
        )
    if config.steps is not None and config.steps > total:
        warnings.append(
            f"the run ends at step {total:,}, not at --steps {config.steps:,}: --epochs "
            f"{config.epochs:g} of {plan.images:,} images in batches of {plan.global_batch_size} "
            "end first"
        )
    if config.profile is not None and (last := int(config.profile.split(",")[-1])) > total:
        warnings.append(
            f"--profile {config.profile}: the run ends at step {total:,}, before {last:,}"
        )
    elif config.profile is not None and step >= last:
        warnings.append(f"--profile {config.profile}: the run continues from step {step:,}")
    if missed and not is_cut:
        warnings.append(f"the run ends at step {total:,}, before {missed}")
    if (decay := plan.first_decay) < min(plan.warmup_steps, total):
        warnings.append(
            f"the warm-up ends at step {plan.warmup_steps:,}, but the learning rate decays from "
            f"step {decay:,} on: --warmup {short_warmup(decay, 10)}st ends before it"
        )
    is_kept = plan.config.sources["train.decay_epochs"] == CONTINUED
    if is_kept and plan.is_cosine and (end := plan.decay_steps[-1]) < total:
        warnings.append(
            f"the schedule of {plan.out} ends at step {end:,}: the learning rate stays at "
            f"{plan.lr(total):.3g} after it; --resume-changed fits it to {total:,} steps, "
            "another --out starts a new run"
        )
    return warnings + _warnings_of_evaluations(plan)


def _warnings_of_evaluations(plan: Plan) -> list[str]:
    """Return warnings about options of the user that change no evaluation."""
    config, warnings = plan.config.train, list[str]()
    late = [f"{epoch:g}" for epoch in config.eval_at if plan.step_at(epoch) > plan.total_steps]
    if late and plan.config.is_chosen("train.eval_at"):
        epochs = plan.epoch(plan.total_steps)
        warnings.append(f"--eval-at {','.join(late)}: the run ends after {epochs:.4g} epochs")
    count = len(plan.evaluations_after(0))
    if config.patience is not None and count <= config.patience + 1:  # the first one is the best
        warnings.append(
            f"--patience {config.patience} cannot end a run with {counted(count, 'evaluation')} "
            "earlier: --eval-every evaluates more often"
        )
    return warnings
