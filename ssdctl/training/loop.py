"""The training loop.

    summary = run_training(resolved, emit=show, progress=progress_bar)

`emit` is called with every record of metrics.jsonl after it is written, and with the records for
the display that ssdctl/runs/progress.py lists. Messages go to the logger `ssdctl.training`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ssdctl.checkpoint.async_writer import AsyncCheckpointWriter
from ssdctl.checkpoint.format import payload
from ssdctl.config.render import snapshot
from ssdctl.config.resolve import Resolved
from ssdctl.device import open_device
from ssdctl.distributed import collectives
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import DataError, DiskError, IntegrityError, Stopped
from ssdctl.input.batch import Batch
from ssdctl.input.loader import open_input
from ssdctl.input.sampler import LoaderConfig
from ssdctl.runs.checkpoints import CheckpointDir
from ssdctl.runs.layout import RunDir
from ssdctl.runs.lock import exclusive_run
from ssdctl.runs.metrics import Record
from ssdctl.runtime import signals
from ssdctl.runtime.progress import Progress, without_progress
from ssdctl.training.early_stopping import EarlyStopping
from ssdctl.training.ema import EMA
from ssdctl.training.light_optimizer import without_dynamo
from ssdctl.training.loss_scale import loss_scale
from ssdctl.training.memory import out_of_memory_hints
from ssdctl.training.nonfinite import NonFiniteGuard
from ssdctl.training.optimizer import build_optimizer
from ssdctl.training.profile import StepProfiler
from ssdctl.training.progress_log import ProgressLog
from ssdctl.training.resume import load_or_initialize, restore, step_of_plan
from ssdctl.training.schedule import every
from ssdctl.training.setup import Setup, deterministic_kernels, prepare_run
from ssdctl.training.step import StepResult, TrainStep, copy_ahead
from ssdctl.training.throughput import ThroughputMeter
from ssdctl.training.validate import Validator

log = logging.getLogger(__name__)


class Summary(NamedTuple):
    """The result of a run."""

    out: str
    step: int
    images_per_second: float
    best_ap: float | None
    peak_memory_bytes: int
    total_s: float
    data_wait: float  # fraction of the training time spent waiting for images


def run_training(
    resolved: Resolved, *, emit: Callable[[Record], None], progress: Progress
) -> Summary:
    """Train to the last step of the schedule, or to the target AP; resume if a run was stopped.

    Raises:
        UsageError: Another process trains in the run folder; or see `prepare_run`.
        Stopped: A signal came; everything is saved.
        NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
        DistributedError: Another rank was lost.
        DiskError: A checkpoint cannot be written.
    """
    ranks = find_ranks()
    config = resolved.config.train
    with signals.ending_at_once():
        device = open_device(config.device, ranks.local_rank, config.execution)
    with (
        deterministic_kernels(config.deterministic),
        without_dynamo(),
        process_group(ranks, device, config.rank_timeout),
    ):
        for notice in device.notices:
            log.warning("%s", notice)
        with contextlib.ExitStack() as exit_stack:
            with signals.ending_at_once():
                setup = prepare_run(
                    resolved, device, ranks, progress if ranks.is_main else without_progress
                )
                if ranks.is_main:
                    exit_stack.enter_context(exclusive_run(setup.out))
                trainer = _Trainer(setup, emit)
            exit_stack.callback(trainer.progress_log.close_trackers)
            exit_stack.callback(trainer.checkpoint_writer.close)
            return trainer.train()


class _Trainer:
    """The state of a run between its steps."""

    def __init__(self, setup: Setup, emit: Callable[[Record], None]) -> None:
        config, self.plan = setup.config.train, setup.plan
        self.setup = setup
        self.optimizer = build_optimizer(setup.model, config, setup.device)
        self.loss_scale = loss_scale(setup.precision, setup.device, self.optimizer)
        self.checkpoints = CheckpointDir(setup.out, config.keep)
        self.checkpoint_writer = AsyncCheckpointWriter(self.checkpoints)
        eval_every = every(config.eval_every, self.plan) if config.eval_every else None
        self.validator = Validator(setup, eval_every)
        self.save_every = every(config.save_every, self.plan)

        start = load_or_initialize(setup, self.checkpoints, self.optimizer)
        self.step = self.first_step = start.step
        self.first_sample = start.samples_seen
        self.ema = EMA(setup.model, config.ema) if config.ema else None
        if self.ema is not None and start.averaged is not None:
            self.ema.load(start.averaged)
        self._restore_statistics(start.rank_statistics)
        self.saved_step = start.step if start.is_saved else None
        self.averaged_step: int | None = None  # after which batch norm was averaged over the ranks
        if setup.ranks.is_main:
            self.checkpoints.clean()
            for path in self.checkpoints.continue_from(self.step):
                log.warning(
                    "%s: the next save sets it aside, the run continues from step %d",
                    path.name,
                    self.step,
                )
        self.throughput = ThroughputMeter(self.plan.global_batch_size)
        self.progress_log = ProgressLog(setup, self.step, emit, self.throughput)
        past = self.progress_log.past_evaluations()
        last = max((record["step"] for record in past), default=None)
        self.evaluated_step = collectives.broadcast(last, setup.ranks)
        best_ap = None if past else start.best_ap
        self.early_stopping = EarlyStopping(best_ap, config.target_ap, config.patience)
        for record in past:
            self.early_stopping.update(float(record["AP"]))
        self.batches: Iterator[Batch] = iter(())
        self.saved_at = time.monotonic()
        self.flags = collectives.FlagExchange(setup.ranks)
        self.is_save_requested = False
        self.guard = NonFiniteGuard(config.on_nonfinite)
        self.memory_hints = functools.partial(
            out_of_memory_hints,
            setup.architecture,
            config,
            self.plan.batch_size,
            setup.device,
            setup.precision,
        )
        self.profiler = StepProfiler(
            config.profile, RunDir(setup.out).profile, setup.device, setup.ranks
        )

    def train(self) -> Summary:
        setup, total_steps = self.setup, self.plan.total_steps
        log_every = setup.config.train.log_every
        train_step = TrainStep(
            setup.model,
            self.optimizer,
            setup.device,
            setup.config.train,
            setup.precision,
            setup.ranks,
            self.loss_scale,
        )
        self._start_input()
        setup.model.train()
        self.throughput.start()

        is_over = self._between_steps(wait=True)
        if self.step > 0 and self.validator.is_due(self.step):
            self._evaluate()  # the run was stopped before this evaluation
        while self.step < total_steps and not is_over:
            lr = self.plan.lr(self.step)
            result = self._train_step(train_step, lr)
            if self.step % log_every == 0 or self.step == total_steps:
                with (
                    torch.profiler.record_function("wait: device, at a log point"),
                    self.memory_hints(),
                ):
                    losses = result.read(setup.ranks)
                self.progress_log.step(self.step, losses, lr)
                self.progress_log.bad_images(self.step)
                self._handle_bad_steps()
            self.progress_log.epoch_ended(self.step)
            with self.throughput.paused():
                if message := self.profiler.after(self.step, is_last=self.step == total_steps):
                    log.info("%s", message)
                is_over = self._between_steps(wait=False)
                if self.validator.is_due(self.step):
                    self._evaluate()
        return self._finish(ended_early=is_over)

    def _train_step(self, train_step: TrainStep, lr: float) -> StepResult:
        """Take the next optimizer step. Does not wait for the device."""
        config = self.setup.config.train
        self.profiler.before(self.step + 1)
        with torch.profiler.record_function("wait: next batch"), self.throughput.waiting():
            batches = self._next_batches(config.accumulate)
        self.progress_log.before_step(self.step, batches)
        with self.memory_hints():
            result = train_step(batches, lr)
        self.step += 1
        self.throughput.step_done()
        self.progress_log.position(self.step)
        self.guard.watch(self.step, result.is_bad, self._image_ids(batches))
        if self.ema is not None:
            self.ema.update()
        return result

    def _next_batches(self, count: int) -> list[Batch]:
        """Return the next step's batches; if the input fails, save the steps before.

        Several ranks need each other to save, and only this one has failed: they do not.
        """
        try:
            return list(itertools.islice(self.batches, count))
        except (DataError, DiskError):
            if self.setup.ranks.is_single_process:
                self._save()
                self.checkpoint_writer.wait()
            raise

    def _handle_bad_steps(self) -> None:
        """Record the skipped steps since the last log point; roll back if the policy is that.

        Raises:
            NonFiniteError: The policy is `stop`, or there were too many.
        """
        if bad := self.guard.check():
            self.progress_log.bad_steps(self.step, bad)
            if self.guard.should_roll_back(bad, str(RunDir(self.setup.out).nonfinite)):
                self._roll_back()

    def _between_steps(self, *, wait: bool) -> bool:
        """Stop or save if that is due; return whether the run ends early.

        Args:
            wait: Whether to wait for the other ranks' requests. Otherwise those of the previous
                call are handled, which costs no time.

        Raises:
            Stopped: A signal came to any of the ranks.
            DiskError: The last save failed.
        """
        self.checkpoint_writer.check()
        self._collect_evaluation(wait=False)
        signal_name = signals.stop_requested()
        flags = (
            signal_name is not None,
            self._requests_save(),
            self.early_stopping.reason_to_end() is not None,
        )
        agree = self.flags.settle if wait else self.flags.exchange
        stop, save, is_over = agree(flags)
        if stop:
            self._stop(signal_name)
        if save:
            self.is_save_requested = False
        is_due = self.save_every.is_due(self.step)
        if (save or is_due) and self.step > self.first_step:
            self._save(is_scheduled=is_due)
        return is_over

    def _requests_save(self) -> bool:
        """Return whether a save is due by the first rank's clock, once for every save.

        A save that is due by the number of steps needs no request: all ranks count them.
        """
        period = self.save_every.seconds
        if period is None or self.is_save_requested or not self.setup.ranks.is_main:
            return False
        self.is_save_requested = time.monotonic() - self.saved_at >= period
        return self.is_save_requested

    def _stop(self, signal_name: str | None) -> None:
        self._collect_evaluation(wait=True)
        self._save(is_scheduled=False)
        self.checkpoint_writer.wait()
        total_s = round(self.throughput.total_s, 1)
        self.progress_log.event("stopped", self.step, signal=signal_name, total_s=total_s)
        self.progress_log.close(self.step, is_success=False)
        # mpirun ends the other ranks soon after the first exits: not during a save.
        collectives.barrier(self.setup.ranks)
        raise Stopped(
            f"stopped by {signal_name or 'another rank'} at step {self.step}/"
            f"{self.plan.total_steps}; progress saved in {self.setup.out}",
            hint="run the same command again to continue",
        )

    def _start_input(self) -> None:
        """Open the input at the next sample of the stream."""
        setup, config = self.setup, self.setup.config.train
        plan = LoaderConfig.of(
            config,
            setup.train,
            batch_size=self.plan.batch_size,
            threads=setup.threads,
            accumulate=config.accumulate,
            augment=config.augment if config.overfit is None else "none",
            first_sample=self._next_sample(),
            rank=setup.ranks.rank,
            world_size=setup.ranks.world_size,
        )
        source = open_input(
            config.pipeline,
            setup.train,
            plan,
            fake=config.fake_data,
            decoder=setup.device.decoder,
            buffer=setup.device.host_buffer,
        )
        batches = source.batches(0, self.plan.total_steps - self.step)
        self.batches = copy_ahead(batches, setup.device)

    def _next_sample(self) -> int:
        """Return the position of the first sample in the stream that was not trained on yet."""
        return self.first_sample + (self.step - self.first_step) * self.plan.global_batch_size

    def _image_ids(self, batches: Sequence[Batch]) -> list[int]:
        return [int(i) for batch in batches for i in self.setup.train.image_ids[batch.rows]]

    def _roll_back(self) -> None:
        """Restore the last checkpoint's weights and continue with the next images of the stream."""
        setup = self.setup
        self._collect_evaluation(wait=True)
        self.checkpoint_writer.wait()
        checkpoint = None
        if setup.ranks.is_main:
            checkpoint, _ = self.checkpoints.newest_intact()
        checkpoint = collectives.broadcast(checkpoint, setup.ranks)
        if checkpoint is None:  # nothing saved yet, and skipped steps changed no weight
            return
        next_sample, bad_step = self._next_sample(), self.step
        averaged = restore(setup.model, self.optimizer, checkpoint)
        if self.ema is not None and averaged is not None:
            self.ema.load(averaged)
        self._restore_statistics(checkpoint.rank_statistics)
        self.first_sample = next_sample
        self.first_step = self.step = step_of_plan(checkpoint, self.plan)
        self._start_input()
        self.saved_step = self.evaluated_step = self.averaged_step = None
        if setup.ranks.is_main:
            self.checkpoints.continue_from(self.step)
        self.progress_log.rewind(self.step)
        self._save()  # so that a resumed run skips the offending images too
        self.progress_log.event("rolled_back", self.step, from_step=bad_step)
        log.info("rolled back to %s (step %d); the next images follow", checkpoint.path, self.step)

    def _evaluate(self) -> None:
        """Detect and save; start to score the detections while the next steps run."""
        setup = self.setup
        if setup.val is None or self.evaluated_step == self.step:
            return
        self._collect_evaluation(wait=True)
        self.progress_log.evaluation_started(self.step)
        self._average_statistics()
        if self.ema is None:
            detections = self.validator.detect()
        else:
            with self.ema.in_place():
                detections = self.validator.detect()
        self.progress_log.position(self.step)
        if any(collectives.any_rank([signals.stop_requested() is not None], setup.ranks)):
            # Stops: not all images were evaluated; the resumed run evaluates again.
            self._between_steps(wait=True)
            return
        self.evaluated_step = self.step
        self._save()
        if detections is not None:
            self.progress_log.detections(detections, self.step)
            self.validator.start_scoring(
                detections, self.step, round(self.plan.epoch(self.step), 4)
            )

    def _collect_evaluation(self, *, wait: bool) -> None:
        """Record the evaluation that was scored in the background, if one is done."""
        evaluation = self.validator.scored(wait=wait)
        if evaluation is None:
            return
        is_best = self.early_stopping.update(evaluation.figures["AP"])
        if is_best:
            assert evaluation.about.step is not None
            self.checkpoint_writer.mark_best(evaluation.about.step)
        self.progress_log.evaluation(evaluation, self.validator.losses, is_best=is_best)

    def _average_statistics(self) -> None:
        """Average the statistics of batch norm, and their moving averages, once after a step."""
        if self.averaged_step == self.step:
            return
        averages = [] if self.ema is None else self.ema.buffers()
        collectives.average_buffers([*self.setup.model.buffers(), *averages], self.setup.ranks)
        self.averaged_step = self.step

    def _own_statistics(self) -> list[torch.Tensor]:
        """Return this rank's statistics of batch norm, and their moving averages."""
        buffers = [*self.setup.model.buffers(), *(() if self.ema is None else self.ema.buffers())]
        return [buffer for buffer in buffers if buffer.is_floating_point()]

    def _restore_statistics(self, saved: Sequence[Sequence[torch.Tensor]] | None) -> None:
        """Load this rank's statistics, if as many ranks wrote theirs; else the average remains.

        Raises:
            IntegrityError: They are not of this network.
        """
        if saved is None or len(saved) != self.setup.ranks.world_size:
            return
        own, mine = self._own_statistics(), saved[self.setup.ranks.rank]
        if [b.shape for b in own] != [b.shape for b in mine]:
            raise IntegrityError("the checkpoint has statistics of batch norm of another network")
        for buffer, value in zip(own, mine, strict=True):
            buffer.copy_(value)

    def _save(self, *, is_scheduled: bool = True) -> None:
        """Save, if this step is not saved yet.

        A save that is not scheduled, as at a signal, does not change the state that training
        continues with: the checkpoint has each rank's statistics, too.
        """
        if self.saved_step == self.step:
            return
        statistics, own = None, []
        if not is_scheduled and not self.setup.ranks.is_single_process:
            own = [buffer.detach().to("cpu", copy=True) for buffer in self._own_statistics()]
            statistics = collectives.gather_to_first(own, self.setup.ranks)
        setup = self.setup
        # A checkpoint has the best AP of the steps before it: a resumed run need not repeat them.
        self._collect_evaluation(wait=True)
        self._average_statistics()
        if setup.ranks.is_main:
            self.checkpoint_writer.save(
                payload(
                    model=setup.model,
                    averaged=None if self.ema is None else self.ema.state(),
                    architecture=setup.architecture,
                    classes=setup.train.classes,
                    config=snapshot(setup.config),
                    step=self.step,
                    samples_seen=self._next_sample(),
                    images=self.plan.images,
                    global_batch=self.plan.global_batch_size,
                    best_ap=self.early_stopping.ap,
                    optimizer=self.optimizer,
                    rank_statistics=statistics,
                )
            )
        for buffer, value in zip(self._own_statistics() if own else [], own, strict=True):
            buffer.copy_(value)
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def _finish(self, *, ended_early: bool) -> Summary:
        was_finished = self.throughput.images == 0 and self.evaluated_step == self.step
        self.progress_log.training_ended()
        if reason := self.early_stopping.reason_to_end():
            log.info("%s", reason)
        if not ended_early:
            self._evaluate()
        self._between_steps(wait=True)  # handle a signal that came in the meantime
        self._collect_evaluation(wait=True)
        self._save()
        self.checkpoint_writer.wait()
        summary = Summary(
            out=str(self.setup.out),
            step=self.step,
            images_per_second=round(self.throughput.images_per_second, 2),
            best_ap=self.early_stopping.ap,
            peak_memory_bytes=self.setup.device.peak_memory_bytes(),
            total_s=round(self.throughput.total_s, 1),
            data_wait=round(self.throughput.data_wait, 4),
        )
        if not was_finished:
            facts = {k: v for k, v in summary._asdict().items() if k not in ("out", "step")}
            self.progress_log.event("finished", self.step, **facts)
        self.progress_log.close(self.step, is_success=True)
        return summary
