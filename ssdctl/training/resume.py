"""Find the checkpoint that a run continues from, and save the run, on the first rank."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import posixpath
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.checkpoint.file import load_resumable, same_classes
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.config.render import snapshot
from ssdctl.config.settings import Kind, Setting, Source, all_settings
from ssdctl.data.annotations import ClassName, class_differences
from ssdctl.data.store_folder import real_path
from ssdctl.distributed import Ranks, collectives
from ssdctl.errors import IntegrityError, SsdctlError, UsageError
from ssdctl.runs.folder import RunDir
from ssdctl.runs.going_back import has_continued_from
from ssdctl.runtime.safe_text import quoted
from ssdctl.training.small_data import DECAY, OPTIMIZER

if TYPE_CHECKING:
    from ssdctl.checkpoint.format import Checkpoint
    from ssdctl.distributed import Ranks
    from ssdctl.training.plan import Plan

log = logging.getLogger(__name__)
NETWORK = {"model.backbone", "model.extra_norm", "train.init"}  # --resume-changed cannot help
# Settings that choose the images.
CHOOSING = {f"train.{name}" for name in ("limit_train", "overfit", "background", "fake_data")}
CHOOSING |= {"train.fold", "train.group", "data.tile", "data.tile_overlap"}


def find_checkpoint(plan: Plan, classes: list[ClassName] | None, ranks: Ranks) -> Checkpoint | None:
    """Return the checkpoint to resume from, on all ranks; None if a new run begins.

    Args:
        classes: Those of the dataset; None if a plan does not know them.

    Raises:
        UsageError: `--resume never` in a folder with checkpoints; or a setting that affects
            the results differs.
        IntegrityError: The named checkpoint, or every one of the run, is damaged; or it has
            other classes.
    """
    checkpoint = collectives.from_first(lambda: _find(plan, classes), ranks)
    if checkpoint is not None:
        step, total = plan.step_of(checkpoint), plan.total_steps
        if step < total:
            log.info("resuming from %s (step %d of %d)", checkpoint.path, step, total)
        else:
            log.info("%s is at step %d of %d: nothing left to train", checkpoint.path, step, total)
    return checkpoint


def _find(plan: Plan, classes: list[ClassName] | None) -> Checkpoint | None:
    config, out = plan.config.train, plan.out
    resume = config.resume
    if resume == "never":
        if RunDir(out).is_started():
            raise UsageError(
                f"{out} is not empty, and --resume never would mix a new run into it",
                hint="choose another --out, or leave --resume out to continue it",
            )
        return None
    RunDir(out).require_own_files()
    if resume == "auto":
        checkpoint, warnings = CheckpointFolder(out, config.keep).newest_intact()
        for warning in warnings:
            log.warning("%s", warning)
        if checkpoint is None:
            return None
    else:
        _refuse_foreign_checkpoints(out)
        named = Path(resume)
        checkpoint = _own_branch(named, out) or _not_mixed(load_resumable(named), out)
    _check_changes(plan, checkpoint)
    before, now = checkpoint.config.get("data.root"), plan.config.data.root
    # Not an error: datasets are moved.
    if before and now and posixpath.normpath(before) != posixpath.normpath(now):
        text = "%s was trained on %s, this run continues with %s"
        log.warning(text, checkpoint.path, before, now)
    if classes is not None:
        _check_classes(checkpoint, classes)
    if CheckpointFolder(out, config.keep).is_own(checkpoint.path):
        return checkpoint
    return dataclasses.replace(checkpoint, best_ap=None)  # another run's best


def _refuse_foreign_checkpoints(out: Path) -> None:
    """Refuse best.pt and last.pt that would be replaced, unless they are a run's."""
    if RunDir(out).step_checkpoints():
        return
    try:
        CheckpointFolder(out, keep=1).newest_intact()
    except IntegrityError as error:
        raise IntegrityError(str(error), hint="choose another --out, or move them away") from None


def _own_branch(named: Path, out: Path) -> Checkpoint | None:
    """Return the newest checkpoint of the run if it already continued from `--resume FILE`.

    So the same command, run again, continues the run instead of going back, even without FILE.
    """
    if not has_continued_from(RunDir(out), named):
        return None
    own, warnings = CheckpointFolder(out, keep=1).newest_intact()
    for warning in warnings:
        log.warning("%s", warning)
    if own is not None and own.path.resolve() != named.resolve():
        log.warning("%s came from --resume %s: continuing from it", own.path, named)
    return own


def _not_mixed(named: Checkpoint, out: Path) -> Checkpoint:
    """Return the checkpoint of `--resume FILE`; refuse another run's if the run has intact ones."""
    folder = CheckpointFolder(out, keep=1)
    with contextlib.suppress(IntegrityError):
        if not folder.is_own(named.path) and folder.newest_intact()[0] is not None:
            raise UsageError(
                f"{out} has a run that did not continue from {named.path}",
                hint="leave --resume out to continue it; another --out starts a new run",
            )
    return named


def _check_classes(checkpoint: Checkpoint, classes: list[ClassName]) -> None:
    """Compare the classes by name and order; warn if only the category ids differ."""
    if not same_classes(checkpoint, classes):
        difference = class_differences(checkpoint.classes, classes)
        raise IntegrityError(
            f"{checkpoint.path} was trained on other classes than the dataset has: "
            f"{difference or 'the same ones come in another order'}",
            hint="--init takes its weights into a new run, those of the classes by name",
        )
    ids = [c.id for c in classes]
    if None not in ids and [c.id for c in checkpoint.classes] != ids:
        text = "the category ids differ from those of %s: classes matched by name"
        log.warning(text, checkpoint.path)


def _check_changes(plan: Plan, checkpoint: Checkpoint) -> None:
    """Compare the settings that affect results with the checkpoint's; warn if they may differ."""
    changed, now = _changed_settings(plan, checkpoint), snapshot(plan.config)
    texts = []  # first what a rule's settings follow
    if is_other_batch := checkpoint.global_batch != plan.global_batch_size:
        texts.append(f"the global batch was {checkpoint.global_batch}, is {plan.global_batch_size}")
    if is_other_data := checkpoint.images != plan.images:
        texts.append(f"the dataset had {checkpoint.images} images, has {plan.images}")
    sources = plan.config.sources
    for path, before in changed.items():
        source = f" ({sources[path]})" * plan.config.is_chosen(path)
        texts.append(f"{path} was {before!r}, is {now[path]!r}{source}")
    if not texts:
        return
    is_other_network = not NETWORK.isdisjoint(changed)
    # The steps of a run folder are counted in one global batch.
    needs_folder = is_other_batch and bool(RunDir(plan.out).resumable())
    if plan.config.train.resume_changed and not (is_other_network or needs_folder):
        log.warning("changed since %s: %s", checkpoint.path, "; ".join(texts))
        return
    by_rule = {p for p, source in sources.items() if source.kind is Kind.RULE}
    # With another batch, the rule chooses other values.
    named = {path for path in changed if not (is_other_batch and path in by_rule)}
    for group in ({f"train.{name}" for name in names} for names in (OPTIMIZER, DECAY)):
        if not group.isdisjoint(named):  # then the rule chooses none of the group
            named |= group & by_rule
    saved = checkpoint.config
    has_no_source = now["train.init"] is None and plan.config.train.resume == "auto"
    if has_no_source and _located(saved.get("train.init")):  # with --init, other rules apply
        named = {path for path in named if plan.config.is_chosen(path)} | {"train.init"}
    options = [
        _option(setting, saved.get(path), sources[path])
        for path, setting in all_settings().items()
        if path in named
    ]
    batch_size, rest = divmod(checkpoint.global_batch, plan.global_batch_size // plan.batch_size)
    if is_other_batch and not rest:
        options.append(f"--bs {batch_size}")
    chosen = CHOOSING.intersection(changed).difference(by_rule)
    is_force_needed = (is_other_batch and rest) or (is_other_data and not chosen)
    options.sort(key=lambda option: option.startswith("("))  # "(no --limit-train)"
    hints, force = [], "--resume-changed"
    if needs_folder:
        force = f"--out FOLDER --resume {quoted(checkpoint.path)} --resume-changed"
    if is_other_network or not is_force_needed:
        given = [*options, force] if is_force_needed else options
        hints.append(f"continue it with {' '.join(given)}")
    if not is_other_network:
        hints.append(f"{force} continues anyway")
    raise UsageError(
        f"{checkpoint.path} was trained with other settings: {'; '.join(texts)}",
        hint="; ".join([*hints, "another --out starts a new run"]),
    )


def _option(setting: Setting, value: object, source: Source) -> str:
    """Return the option that sets a value instead of the one of this call."""
    if value is not None:
        return setting.as_option(value)
    is_typed = source.kind is Kind.CALL
    return f"(no {source.named(setting.path)})" if is_typed else f"--set {setting.path}="


def _changed_settings(plan: Plan, checkpoint: Checkpoint) -> dict[str, object]:
    """Return the values that the checkpoint was trained with, of the settings that differ."""
    now, idle = snapshot(plan.config), {p for paths, *_ in plan.idle_settings() for p in paths}
    before, changed = checkpoint.config, dict[str, object]()
    for path, setting in all_settings().items():
        if setting.is_compared and path not in idle:
            saved = before.get(path)
            if _plain(path, saved) != _plain(path, now[path]):
                changed[path] = saved
    # The weights of --init are not read again, but another file's are not those of this run.
    init, first = now["train.init"], before.get("train.init")
    if init is not None and init != first:
        one, other = (_located(source) for source in (init, first))
        if first is None or (one and other and one != other):
            changed["train.init"] = first
        elif not (one and other):
            log.warning("--init %s is not read: the run began with %s", init, first)
    return changed


def _located(source: str | None) -> Path | None:
    """Return the file that `--init` names; None if it is not here."""
    from ssdctl.checkpoint.locate import locate_checkpoint  # late: the loop needs no downloads

    if source is None or not Path(source).exists():
        return None
    with contextlib.suppress(SsdctlError):
        return Path(real_path(locate_checkpoint(source)))
    return None


def _plain(path: str, value: object) -> object:
    if path == "data.tile" and value == 0:
        return None
    return list(value) if isinstance(value, tuple) else value


class Saver(CheckpointFolder):
    """Writes the checkpoints of a run in a thread, on the first rank; all ranks call it alike."""

    def __init__(self, plan: Plan, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(plan.out, plan.config.train.keep)
        resume = plan.config.train.resume
        self._resumed = None if resume in ("auto", "never") else Path(resume)
        self._every = plan.every(plan.config.train.save_every)
        self._since = time.monotonic()  # the last save, or the last time that one was due
        self.saved_step: int | None = None
        self.is_requested = False  # by the clock: save after the next step

    def start(self, step: int, checkpoint: Checkpoint | None) -> None:
        """Set aside the checkpoints after `step`, from which the run continues."""
        is_own = checkpoint is not None and self.is_own(checkpoint.path)
        self.saved_step = step if is_own else None
        if not self._ranks.is_main:
            return
        resumed, file = self._resumed, None
        if checkpoint is not None and resumed is not None and resumed.exists():
            file = resumed if checkpoint.path.samefile(resumed) else None
        if checkpoint is not None:
            self.begin(checkpoint)
        for path in self.go_back(step, file):
            log.warning("%s: set aside, the run continues from step %d", path.name, step)

    def mark_best(self, step: int) -> None:
        """Publish the checkpoint of a step and its evaluation as the best, once it is written."""
        self.best_step = step
        if self._ranks.is_main:
            self.wait()
            self.update()

    def set_thresholds(self, step: int, thresholds: list[float | None]) -> None:
        """Start to add an evaluation's score thresholds to the checkpoint of its step."""
        if self._ranks.is_main:
            self.start_to_add(step, thresholds)

    def is_due(self, step: int) -> bool:
        """Return whether a save is due by the number of steps, which all ranks count."""
        return self._every.is_due(step)

    def is_due_by_clock(self) -> bool:
        """Return whether a save is due by the first rank's clock; true once for every save."""
        now, period = time.monotonic(), self._every.seconds
        if period is None or not self._ranks.is_main or now - self._since < period:
            return False
        self._since = now
        return True

    def save(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint; its tensors are copied before this returns."""
        if self._ranks.is_main:
            super().save(checkpoint)
        self.saved_step, self._since = checkpoint.step, time.monotonic()
        self.is_requested = False

    def newest(self) -> Checkpoint | None:
        self.wait()
        return collectives.from_first(lambda: self.newest_intact()[0], self._ranks)
