"""The training loop: linear, from the first step to the last, on one screen.

    summary = run_training(resolved, say=print, warn=print, emit=show, progress=tqdm_like)

`emit` gets every record of metrics.jsonl as it is written; `say` and `warn` get
what a user should read.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ssdctl.checkpoint.async_writer import AsyncCheckpointWriter
from ssdctl.checkpoint.writer import CheckpointDir, payload
from ssdctl.config.render import values
from ssdctl.config.resolve import Resolved
from ssdctl.device import open_device
from ssdctl.distributed import collectives
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import Stopped
from ssdctl.input.loader import Batch
from ssdctl.input.pipelines import open_input
from ssdctl.input.samples import LoaderConfig
from ssdctl.runs.evaluation import Evaluation
from ssdctl.runs.lock import exclusive_run
from ssdctl.runs.metrics import Record
from ssdctl.runs.writer import RunWriter
from ssdctl.runtime import signals
from ssdctl.train.early_stopping import EarlyStopping
from ssdctl.train.ema import EMA
from ssdctl.train.loss_scale import loss_scale
from ssdctl.train.memory import out_of_memory_hints
from ssdctl.train.nonfinite import NonFiniteGuard
from ssdctl.train.optimizer import build_optimizer
from ssdctl.train.profile import StepProfiler
from ssdctl.train.progress_log import ProgressLog
from ssdctl.train.resume import load_or_initialize, restore
from ssdctl.train.schedule import every
from ssdctl.train.setup import Progress, Say, Setup, prepare_run, with_usable_precision
from ssdctl.train.step import TrainStep, copied_ahead
from ssdctl.train.throughput import ThroughputMeter
from ssdctl.train.validate import Validator


class Summary(NamedTuple):
    """How a run ended."""

    out: str
    step: int
    images_per_second: float
    best_ap: float | None
    peak_memory_bytes: int
    total_s: float
    data_wait: float  # share of the training time that went by waiting for images


def run_training(
    resolved: Resolved,
    *,
    say: Say,
    warn: Say,
    emit: Callable[[Record], None],
    progress: Progress,
) -> Summary:
    """Train to the end of the plan, or to the target AP, going on where an earlier run stopped.

    Raises:
        UsageError: Another process trains in the run folder, or see `prepare_run`.
        Stopped: A signal came; everything is saved.
        NonFiniteError: Too many steps went bad.
        DistributedError: Another rank was lost.
        DiskError: A checkpoint cannot be written.
    """
    ranks = find_ranks()
    wishes = resolved.config.train
    quiet = not ranks.is_main
    say, warn, emit = (_muted(speak, quiet) for speak in (say, warn, emit))
    with signals.ending_at_once():
        device = open_device(wishes.device, ranks.local_rank, wishes.execution)
    with process_group(ranks, device, wishes.rank_timeout):
        resolved, precision_notice = with_usable_precision(resolved, device)
        for notice in (*device.notices, *filter(None, [precision_notice])):
            warn(notice)
        with contextlib.ExitStack() as held:
            with signals.ending_at_once():
                setup = prepare_run(
                    resolved.config, device, ranks, say, progress if not quiet else _plain
                )
                if ranks.is_main:
                    held.enter_context(exclusive_run(setup.out, say, warn))
                run = _Run(setup, resolved, say, warn, emit)
            held.callback(run.saver.close)
            return run.train()


class _Run:
    """The state of a run between its steps."""

    def __init__(
        self,
        setup: Setup,
        resolved: Resolved,
        say: Say,
        warn: Say,
        emit: Callable[[Record], None],
    ) -> None:
        config, self.plan = setup.config.train, setup.plan
        self.setup, self.say = setup, say
        self.optimizer = build_optimizer(setup.model, config, setup.device)
        self.scale = loss_scale(setup.precision, setup.device, self.optimizer)
        self.checkpoints = CheckpointDir(setup.out, config.keep)
        self.saver = AsyncCheckpointWriter(self.checkpoints)
        eval_every = every(config.eval_every, self.plan) if config.eval_every else None
        self.validator = Validator(setup, eval_every)
        self.save_every = every(config.save_every, self.plan)

        start = load_or_initialize(setup, self.checkpoints, self.optimizer, say, warn)
        self.step = self.first_step = start.step
        self.first_sample = start.samples_seen
        self.average = EMA(setup.model, config.ema) if config.ema else None
        if self.average is not None and start.averaged is not None:
            self.average.load(start.averaged)
        self.saved_step = start.step if start.is_saved else None
        if setup.ranks.is_main:
            self.checkpoints.clean()
            for path in self.checkpoints.retire(self.step):
                warn(f"{path.name}: set aside, the run goes on from step {self.step}")
        self.recorder = RunWriter(setup, resolved, self.step, emit)
        self.evaluated_step = collectives.broadcast(self.recorder.last_evaluation, setup.ranks)
        self.best = EarlyStopping(None, config.target_ap, config.patience)
        for ap in self.recorder.past_aps:
            self.best.update(ap)
        if self.best.ap is None:
            self.best.ap = start.best_ap
        self.batches: Iterator[Batch] = iter(())
        self.pace = ThroughputMeter(self.plan.global_batch_size)
        self.reporter = ProgressLog(setup, self.recorder, self.pace, warn)
        self.saved_at = time.monotonic()

    def train(self) -> Summary:
        setup, config, plan = self.setup, self.setup.config.train, self.plan
        take_step = TrainStep(
            setup.model,
            self.optimizer,
            setup.device,
            config,
            setup.precision,
            setup.ranks,
            self.scale,
        )
        guard = NonFiniteGuard(config.on_nonfinite)
        profiler = StepProfiler(config.profile, setup.out, setup.device, setup.ranks)
        self._start_input()
        setup.model.train()
        self.pace.start()

        is_over = self._between_steps()
        if self.step > 0 and self.validator.is_due(self.step):
            self._evaluate()  # where the run was stopped before it came to that
        while self.step < plan.total_steps and not is_over:
            lr = plan.lr(self.step)
            profiler.before(self.step + 1)
            with torch.profiler.record_function("wait: next batch"), self.pace.waiting():
                batches = list(itertools.islice(self.batches, config.accumulate))
            self.reporter.watch(batches)
            with out_of_memory_hints(setup.architecture, config, setup.device, setup.precision):
                result = take_step(batches, lr)
            self.step += 1
            self.pace.step_done()
            guard.watch(self.step, result.is_bad, self._image_ids(batches))
            if self.average is not None:
                self.average.update()

            if self.step % config.log_every == 0 or self.step == plan.total_steps:
                with torch.profiler.record_function("wait: device, at a log point"):
                    figures = result.read(setup.ranks)
                self.reporter.step(self.step, figures, lr)
                self.reporter.bad_images(self.step)
                if bad := guard.check():
                    self.reporter.bad_steps(self.step, bad)
                    if guard.should_roll_back(bad, str(self.setup.out / "nonfinite")):
                        self._roll_back()

            with self.pace.paused():
                if profile := profiler.after(self.step, is_last=self.step == plan.total_steps):
                    self.say(profile)
                is_over = self._between_steps()
                if self.validator.is_due(self.step):
                    self._evaluate()
        return self._finish(ended_early=is_over)

    def _between_steps(self) -> bool:
        """Between two steps: stop or save if that is due; whether the run has reached its end.

        Raises:
            Stopped: A signal came to any of the ranks.
            DiskError: The last save failed.
        """
        self.saver.check()
        self._collect_evaluation(wait=False)
        asked = signals.stop_requested()
        period = self.save_every
        is_time = period.is_due(self.step)
        if period.seconds is not None:
            is_time = time.monotonic() - self.saved_at >= period.seconds
        flags = (asked is not None, is_time, self.best.reason_to_end() is not None)
        stop, save, is_over = collectives.any_rank(flags, self.setup.ranks)
        if stop:
            self._stop(asked)
        if save and self.step > self.first_step:
            self._save()
        return is_over

    def _stop(self, signal_name: str | None) -> None:
        self._collect_evaluation(wait=True)
        self._save()
        self.saver.wait()
        self.recorder.event("stopped", self.step, signal=signal_name)
        self.recorder.close(self.step, is_success=False)
        # mpirun ends the others soon after the first rank is gone: not in mid-save.
        collectives.barrier(self.setup.ranks)
        raise Stopped(
            f"stopped by {signal_name or 'another rank'} after step {self.step}; "
            f"everything is saved in {self.setup.out}",
            hint="run the same command again to go on",
        )

    def _start_input(self) -> None:
        """Read on from the next sample of the stream."""
        setup, config = self.setup, self.setup.config.train
        plan = LoaderConfig(
            seed=config.seed,
            first_sample=self._next_sample(),
            batch_size=self.plan.batch_size,
            rank=setup.ranks.rank,
            world_size=setup.ranks.world_size,
            accumulate=config.accumulate,
            augment=config.augment == "ssd" and config.overfit is None,
            hue_degrees=config.hue_degrees,
            threads=setup.threads,
            max_boxes=max(setup.train.most_boxes, 1),
        )
        source = open_input(
            config.pipeline,
            setup.train,
            plan,
            fake=config.fake_data,
            decoder=setup.device.decoder,
        )
        batches = source.batches(0, self.plan.total_steps - self.step)
        self.batches = copied_ahead(batches, setup.device)

    def _next_sample(self) -> int:
        """The stream's first sample that no step has taken yet."""
        return self.first_sample + (self.step - self.first_step) * self.plan.global_batch_size

    def _image_ids(self, batches: Sequence[Batch]) -> list[int]:
        return [int(i) for batch in batches for i in self.setup.train.image_ids[batch.rows]]

    def _roll_back(self) -> None:
        """Go back to the last checkpoint's weights, and on with the images that come next."""
        setup = self.setup
        self._collect_evaluation(wait=True)
        self.saver.wait()
        checkpoint = None
        if setup.ranks.is_main:
            checkpoint, _ = self.checkpoints.newest_intact()
        checkpoint = collectives.broadcast(checkpoint, setup.ranks)
        if checkpoint is None:  # nothing saved yet; the bad steps moved nothing either
            return
        next_sample, bad_step = self._next_sample(), self.step
        averaged = restore(setup.model, self.optimizer, checkpoint)
        if self.average is not None and averaged is not None:
            self.average.load(averaged)
        self.first_sample, self.first_step, self.step = (
            next_sample,
            checkpoint.step,
            checkpoint.step,
        )
        self._start_input()
        self.saved_step = self.evaluated_step = None
        if setup.ranks.is_main:
            self.checkpoints.retire(self.step)
        self.recorder.rewind(self.step)
        self._save()  # so that a resume too goes on past the offending images
        self.recorder.event("rolled_back", self.step, from_step=bad_step)
        self.say(f"back to {checkpoint.path} (step {self.step}), past the images up to here")

    def _evaluate(self) -> None:
        """Detect, save, and have the detections scored beside the steps that follow."""
        setup = self.setup
        if setup.val is None or self.evaluated_step == self.step:
            return
        self._collect_evaluation(wait=True)
        self.recorder.evaluation_starts(self.step)
        collectives.average_batch_norms(setup.model, setup.ranks)
        if self.average is None:
            found = self.validator.detect()
        else:
            with self.average.in_place():
                found = self.validator.detect()
        if any(collectives.any_rank([signals.stop_requested() is not None], setup.ranks)):
            self._between_steps()  # stops here: not all images were seen, the resumed run evaluates
            return
        self.evaluated_step = self.step
        self._save()
        if found is not None:
            self.recorder.pictures(found, self.step)
            self.validator.start_scoring(found, self.step, round(self.plan.epoch(self.step), 4))

    def _collect_evaluation(self, *, wait: bool) -> None:
        """Write down the score that has been worked out since the last look, if one has."""
        evaluation: Evaluation | None = self.validator.scored(wait=wait)
        if evaluation is None:
            return
        if self.best.update(evaluation.figures["AP"]):
            assert evaluation.about.step is not None
            self.saver.mark_best(evaluation.about.step)
            self.recorder.best(evaluation)
        # The line comes last: an evaluation without one is made again by the next start.
        self.recorder.evaluation(evaluation)

    def _save(self) -> None:
        if self.saved_step == self.step:
            return
        setup = self.setup
        # A checkpoint knows the scores of the steps before it: a resumed run need not make them.
        self._collect_evaluation(wait=True)
        collectives.average_batch_norms(setup.model, setup.ranks)
        if setup.ranks.is_main:
            self.saver.save(
                payload(
                    model=setup.model,
                    averaged=None if self.average is None else self.average.state(),
                    architecture=setup.architecture,
                    classes=setup.train.classes,
                    config=values(setup.config),
                    step=self.step,
                    samples_seen=self._next_sample(),
                    images=self.plan.images,
                    global_batch=self.plan.global_batch_size,
                    best_ap=self.best.ap,
                    optimizer=self.optimizer,
                )
            )
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def _finish(self, *, ended_early: bool) -> Summary:
        was_finished = self.pace.images == 0 and self.evaluated_step == self.step
        if self.setup.val is None:
            self.say("no validation split: nothing to evaluate")
        if reason := self.best.reason_to_end():
            self.say(reason)
        if not ended_early:
            self._evaluate()
        self._between_steps()  # a signal that came meanwhile
        self._collect_evaluation(wait=True)
        self._save()
        self.saver.wait()
        summary = Summary(
            out=str(self.setup.out),
            step=self.step,
            images_per_second=round(self.pace.images_per_second, 2),
            best_ap=self.best.ap,
            peak_memory_bytes=self.setup.device.peak_memory_bytes(),
            total_s=round(self.pace.total_s, 1),
            data_wait=round(self.pace.data_wait, 4),
        )
        if not was_finished:
            facts = {k: v for k, v in summary._asdict().items() if k not in ("out", "step")}
            self.recorder.event("finished", self.step, **facts)
        self.recorder.close(self.step, is_success=True)
        return summary


def _muted(speak: Callable[[Any], None], quiet: bool) -> Callable[[Any], None]:
    return (lambda _: None) if quiet else speak


def _plain(items: Any, **_: Any) -> Any:
    return items
