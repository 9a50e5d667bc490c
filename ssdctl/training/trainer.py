"""The training loop.

    with open_trainer(resolved, emit=show, progress=progress_bar) as trainer:
        summary = trainer.run()     # or: for step in trainer: ...

Messages go to the logger `ssdctl.training`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from ssdctl.checkpoint import FORMAT
from ssdctl.config.render import snapshot
from ssdctl.distributed import collectives
from ssdctl.errors import DataError, DiskError, Stopped
from ssdctl.input.batch import Batch
from ssdctl.runs.layout import RunDir
from ssdctl.runtime import signals
from ssdctl.training.evaluator import Evaluator
from ssdctl.training.profile import StepProfiler
from ssdctl.training.run_log import Observer, RunLog
from ssdctl.training.saver import Saver
from ssdctl.training.state import EMA, RankStatistics, restore
from ssdctl.training.step import NonFiniteGuard, StepResult, build_step
from ssdctl.training.step_input import StepInput

if TYPE_CHECKING:
    from ssdctl.checkpoint import Checkpoint
    from ssdctl.training.setup import OpenedRun

log = logging.getLogger(__name__)


class Summary(NamedTuple):
    out: str
    step: int
    images_per_second: float
    best_ap: float | None
    peak_memory_bytes: int
    total_s: float
    data_wait: float  # fraction of the training time spent waiting for images


class Trainer:
    """A run. Iterating over it trains, and yields the number of each step after it.

    Its position is `step`, the optimizer steps done, and `samples_seen`, how far it is in the
    stream of samples.

    Args:
        opened: The parts of the run; without a checkpoint, its network has the first weights.
        checkpoint: To continue from.
        emit: Called with every record that is shown (ssdctl/runs/display.py).
    """

    def __init__(self, opened: OpenedRun, checkpoint: Checkpoint | None, emit: Observer) -> None:
        config, ranks = opened.plan.config.train, opened.ranks
        self.opened, self.plan, self.model = opened, opened.plan, opened.model
        self.step = self.samples_seen = 0
        precision = self.plan.precision
        self.train_step = build_step(self.model, config, opened.device, precision, ranks)
        self.optimizer = self.train_step.optimizer
        self.ema = EMA(self.model, config.ema) if config.ema else None
        self.statistics = RankStatistics(self.model, self.ema, ranks)
        if checkpoint is not None:
            self.load_state(checkpoint)
        self.saver = Saver(opened.plan, ranks)
        self.saver.start(self.step, checkpoint)
        self.run_log = RunLog(opened, self.step, emit)
        best_ap = checkpoint and checkpoint.best_ap
        self.evaluator = Evaluator(opened, self.run_log.past_evaluations(), best_ap)
        self.update_links()
        self.input = StepInput(opened)
        self.flags = collectives.FlagExchange(ranks)
        self.guard = NonFiniteGuard(config.on_nonfinite)
        profile = RunDir(opened.plan.out).profile
        self.profiler = StepProfiler(config.profile, profile, opened.device, ranks)
        self._evaluated_before = self.evaluator.evaluated_step

    def run(self) -> Summary:
        """Train to the last step of the schedule, or to the target AP.

        Raises:
            Stopped: A signal came; everything is saved.
            NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
            DataError: The images cannot be read; the steps before are saved.
            DiskError: The store cannot be read, or a checkpoint cannot be written.
        """
        for _ in self:
            pass
        return self.summary()

    def __iter__(self) -> Iterator[int]:
        is_over = self._begin()
        while self.step < self.plan.total_steps and not is_over:
            batches = self._next_batches()
            if is_over := self._agree_with_other_ranks():
                break
            result = self._take_step(batches)
            is_last = self.step == self.plan.total_steps
            log_every = self.opened.plan.config.train.log_every
            if is_last or (log_every and self.step % log_every == 0):
                self._log(result)
            self.run_log.epoch(self.step)
            with self.run_log.throughput.paused():
                self.profiler.after(self.step, is_last=is_last)
                if self.saver.is_due(self.step):
                    self.save()
                if self.evaluator.is_due(self.step):
                    self.evaluate()
            yield self.step
        self._finish()

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint. Its tensors are the run's: copy them before a step.

        `rank_statistics`, which `save` adds to it, are batch norm's statistics of each rank where
        `model` has their average.
        """
        trained = self.model.state_dict()
        return {
            "format": FORMAT,
            "model": trained if self.ema is None else dict(self.ema.state()),  # to evaluate
            "trained": None if self.ema is None else trained,  # to resume from, if it differs
            "architecture": self.opened.architecture._asdict(),
            # label = index + 1; ids are COCO's
            "classes": msgspec.to_builtins(self.opened.train.classes),
            "config": snapshot(self.opened.plan.config),
            "step": self.step,
            "samples_seen": self.samples_seen,
            "images": self.plan.images,  # per epoch
            "global_batch": self.plan.global_batch_size,  # samples per step
            "best_ap": self.evaluator.early_stopping.ap,
            "optimizer": self.optimizer.state_dict(),  # momentum and the like
        }

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint: its weights, their average, momentum and position.

        Raises:
            IntegrityError: They do not fit; the message lists what differs.
        """
        averaged = restore(self.model, self.optimizer, checkpoint)
        if self.ema is not None:
            self.ema.load(self.model.state_dict() if averaged is None else averaged)
        self.step = self.plan.step_of(checkpoint)
        self.statistics.load(checkpoint.rank_statistics, self.step)
        self.samples_seen = checkpoint.samples_seen

    def save(self, *, is_scheduled: bool = True) -> None:
        """Save the run, if this step is not saved yet.

        A save that is not scheduled, as at a signal, does not change the state that training
        continues with: the checkpoint has each rank's statistics of batch norm, too.
        """
        if self.saver.saved_step == self.step:
            return
        # A checkpoint has the best AP of the steps before it: a resumed run need not repeat them.
        self._record_evaluation(wait=True)
        if is_scheduled:
            self.statistics.average(self.step)
            self.saver.save({**self.state_dict(), "rank_statistics": None})
        else:
            with self.statistics.averaged(self.step) as of_ranks:
                self.saver.save({**self.state_dict(), "rank_statistics": of_ranks})

    def evaluate(self) -> None:
        """Detect on the validation split and save; the score comes while the next steps run."""
        self._record_evaluation(wait=True)
        self.run_log.record("position", self.step, is_evaluating=True)
        self.statistics.average(self.step)
        average = contextlib.nullcontext() if self.ema is None else self.ema.in_place()
        with self._saved_before_an_error(), average:
            detections = self.evaluator.detect()
        if collectives.any_rank([signals.stop_requested() is not None], self.opened.ranks)[0]:
            # Stops: not all images were evaluated; the resumed run evaluates again.
            self._agree_with_other_ranks(wait=True)
        self.run_log.record("position", self.step, is_evaluating=False)
        self.run_log.record("detections", self.step, split=self.opened.val, detections=detections)
        self.evaluator.evaluated_step = self.step
        self.save()
        if detections is not None:
            self.evaluator.start_scoring(detections, self.step)

    def summary(self) -> Summary:
        throughput = self.run_log.throughput
        return Summary(
            out=str(self.opened.plan.out),
            step=self.step,
            images_per_second=round(throughput.images_per_second, 2),
            best_ap=self.evaluator.early_stopping.ap,
            peak_memory_bytes=self.opened.device.peak_memory_bytes(),
            total_s=round(throughput.total_s, 1),
            data_wait=round(throughput.data_wait, 4),
        )

    def update_links(self) -> None:
        """Bring best.pt, last.pt, evaluation.json and `keep` up to date with the records."""
        best = self.run_log.best_evaluation()
        # The best AP of a checkpoint whose record was lost is not of a known step.
        if best and best["AP"] == self.evaluator.early_stopping.ap:
            self.saver.best_step = best["step"]
        if self.opened.ranks.is_main:
            self.saver.update()

    def close(self) -> None:
        """Finish the save in progress and close the trackers, whatever ended the run."""
        self.saver.close()
        with contextlib.suppress(DiskError):
            self.run_log.close(self.step, is_success=False)

    def _begin(self) -> bool:
        """Open the input; return whether the run ends early."""
        self.input.start(self.samples_seen, self.plan.total_steps - self.step)
        self.model.train()
        self.run_log.throughput.start()
        is_over = self._agree_with_other_ranks(wait=True)
        if self.step > 0 and self.evaluator.is_due(self.step):
            self.evaluate()  # the run was stopped before this evaluation
        return is_over

    def _next_batches(self) -> list[Batch]:
        self.profiler.before(self.step + 1)
        with (
            torch.profiler.record_function("wait: next batch"),
            self.run_log.throughput.waiting(),
        ):
            return self.input.next()

    def _take_step(self, batches: Sequence[Batch]) -> StepResult:
        self.run_log.step_begins(self.step, batches)
        with self.opened.memory_hints():
            result = self.train_step(batches, self.plan.lr(self.step))
        self.step += 1
        self.samples_seen += self.plan.global_batch_size
        if self.ema is not None:
            self.ema.update()
        ids = self.opened.train.image_ids
        self.guard.watch(self.step, result.is_bad, [int(i) for b in batches for i in ids[b.rows]])
        self.run_log.throughput.step_done()
        self.run_log.record("position", self.step, is_evaluating=False)
        return result

    def _has_trained(self) -> bool:
        return self.run_log.throughput.images > 0

    def _log(self, result: StepResult) -> None:
        """Record the step's values, which waits for the device, and handle skipped steps."""
        with (
            torch.profiler.record_function("wait: device, at a log point"),
            self.opened.memory_hints(),
        ):
            values = result.read(self.opened.ranks)
        self.run_log.losses(self.step, values, self.plan.lr(self.step - 1))
        with self._saved_before_an_error():
            self.run_log.bad_images(self.step)
        if bad := self.guard.check():
            self.run_log.bad_steps(self.step, bad)
            if self.guard.should_roll_back(bad, str(RunDir(self.opened.plan.out).nonfinite)):
                self._roll_back()

    def _agree_with_other_ranks(self, *, wait: bool = False) -> bool:
        """Do what any rank asks for: stop, save; return whether the run ends early.

        Args:
            wait: Whether to wait for the other ranks' requests. Otherwise those of the previous
                call are handled, which costs no time.
        """
        self.saver.check()
        self._record_evaluation(wait=False)
        signal_name = signals.stop_requested()
        flags = (
            signal_name is not None,
            self.input.has_failed,
            self._has_trained() and self.saver.is_due_by_clock(),
            self.evaluator.early_stopping.reason_to_end() is not None,
        )
        agree = self.flags.settle if wait else self.flags.exchange
        stop, has_failed, save, is_over = agree(flags)
        if stop:
            self._stop(signal_name)
        if has_failed:
            with self._saved_before_an_error():
                collectives.run_and_gather(self.input.check, self.opened.ranks)
        if save:
            with self.run_log.throughput.paused():
                self.save(is_scheduled=False)
        return is_over

    def _stop(self, signal_name: str | None) -> None:
        self._record_evaluation(wait=True)
        self.save(is_scheduled=False)
        self.saver.wait()
        total_s = round(self.run_log.throughput.total_s, 1)
        self.run_log.event("stopped", self.step, signal=signal_name, total_s=total_s)
        self.run_log.close(self.step, is_success=False)
        # mpirun ends the other ranks soon after the first exits: not during a save.
        collectives.barrier(self.opened.ranks)
        raise Stopped(
            f"stopped by {signal_name or 'another rank'} at step {self.step}/"
            f"{self.plan.total_steps}; progress saved in {self.opened.plan.out}",
            hint=self._how_to_continue(),
        )

    def _how_to_continue(self) -> str:
        is_same = self.opened.plan.config.train.resume != "never"
        return f"run the same command again{'' if is_same else ' with --resume auto'} to continue"

    @contextlib.contextmanager
    def _saved_before_an_error(self) -> Iterator[None]:
        """Save the steps so far if the block, on all ranks alike, cannot read the data."""
        try:
            yield
        except (DataError, DiskError):
            self.save(is_scheduled=False)
            self.saver.wait()
            raise

    def _roll_back(self) -> None:
        """Restore the last checkpoint's weights and continue with the next images of the stream."""
        self._record_evaluation(wait=True)
        checkpoint = self.saver.newest()
        if checkpoint is None:  # nothing saved yet, and skipped steps changed no weight
            return
        bad_step, samples_seen = self.step, self.samples_seen
        self.load_state(checkpoint)
        self.samples_seen = samples_seen
        self.input.start(samples_seen, self.plan.total_steps - self.step)
        self.saver.start(self.step, None)
        self.run_log.rewind(self.step)
        self.evaluator.rewind(self.run_log.past_evaluations())
        self.update_links()
        self.save()  # so that a resumed run skips the offending images too
        self.run_log.event("rolled_back", self.step, from_step=bad_step)
        log.info("rolled back to %s (step %d); the next images follow", checkpoint.path, self.step)

    def _record_evaluation(self, *, wait: bool) -> None:
        if (scored := self.evaluator.scored(wait=wait)) is None:
            return
        evaluation, is_best = scored
        self.run_log.evaluation(evaluation, self.evaluator.losses, is_best=is_best)
        if is_best:
            assert evaluation.about.step is not None
            self.saver.mark_best(evaluation.about.step)
            self.run_log.best_checkpoint(evaluation.about.step)

    def _finish(self) -> None:
        if reason := self.evaluator.early_stopping.reason_to_end():
            log.info("%s", reason)
        self._agree_with_other_ranks(wait=True)  # handle a signal that came in the meantime
        self._record_evaluation(wait=True)
        self.save()
        self.saver.wait()
        if self._has_trained() or self.step != self._evaluated_before:
            facts = {k: v for k, v in self.summary()._asdict().items() if k not in ("out", "step")}
            self.run_log.event("finished", self.step, **facts)
        self.run_log.close(self.step, is_success=True)
