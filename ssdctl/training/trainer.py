"""The training loop.

    with Trainer("photos", epochs=20) as trainer:
        for step in trainer:
            print(step.step, step.loss)

Messages go to the logger `ssdctl.training`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.config.call import (
    ConfigLike,
    PathLike,
    TrainSettings,
    overrides_of,
    public_call,
    public_iterator,
    resolve_call,
    takes_settings,
)
from ssdctl.config.render import snapshot
from ssdctl.data.store_folder import with_absolute_paths
from ssdctl.device import opened_device
from ssdctl.distributed import collectives, find_ranks
from ssdctl.distributed.process_group import failing_together, process_group
from ssdctl.errors import DataError, DiskError, Stopped, UsageError
from ssdctl.runs.folder import RunDir, exclusive_run, run_dir, step_of, with_paths_from
from ssdctl.runs.run import Run
from ssdctl.runtime import signals
from ssdctl.runtime.progress import without_progress
from ssdctl.runtime.system import usable_cores
from ssdctl.training.evaluator import Evaluator
from ssdctl.training.observers import (
    Detected,
    End,
    Observer,
    Observers,
    Outcome,
    Rewind,
    Saved,
    Scored,
    Start,
    Step,
    Summary,
    best_evaluation,
)
from ssdctl.training.observers.display import Display, log_display
from ssdctl.training.observers.folder import FolderWriter
from ssdctl.training.optimizer import without_dynamo
from ssdctl.training.resume import Saver, find_checkpoint
from ssdctl.training.state import EMA, RankStatistics, restore
from ssdctl.training.step import build_step
from ssdctl.training.step_input import StepInput
from ssdctl.training.throughput import EpochTimer, StepProfiler, StepRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ssdctl.input.batch import Batch
    from ssdctl.runs.evaluation import Evaluation

log = logging.getLogger(__name__)


class Requests(NamedTuple):
    """What any rank asks for between two steps."""

    stop: bool  # a signal came
    check_input: bool  # the images of a later step cannot be read
    save: bool  # by the clock
    end: bool  # the target AP is reached, or patience is exhausted


class Trainer:
    """A training run: iterating over it trains, and yields a record of each step.

        with ssdctl.Trainer("photos", epochs=20) as trainer:
            for step in trainer:
                if step.step == 100:
                    print(step.loss, trainer.model)

    Like `ssdctl.train`, it logs, evaluates, saves and resumes. The `with` block, `open` or the
    first step opens it; the end of the run or of the block, or `close`, closes it. A loop may be
    left and entered again.

    Args:
        data: The dataset folder or file.
        config: A config, or a config file, with other settings.
        observers: Are told about the run, on the first rank. A `Display` among them replaces the
            log lines and the progress bar.
        progress: Show a progress bar, on a terminal and in a notebook.
        settings: See `ssdctl.train`.

    Attributes:
        path: The run folder.
        step: Optimizer steps done.
        samples_seen: Position in the endless stream of training images.
        plan: Settings and schedule, such as `plan.total_steps`. It and the next two exist while
            the trainer is open.
        model: The network that is trained, on its device.
        optimizer: Its optimizer.
        evaluation: The newest evaluation that was scored, on the first rank; else None.

    Raises:
        ssdctl.errors.SsdctlError: See `ssdctl.train`.
    """

    @takes_settings(TrainSettings)
    @public_call()
    def __init__(
        self,
        data: PathLike | None = None,
        *,
        config: ConfigLike | None = None,
        observers: Iterable[Observer] = (),
        progress: bool = True,
        **settings: Unpack[TrainSettings],
    ) -> None:
        with failing_together():
            given = overrides_of("train", {"data": data, **settings})
            self.config = with_absolute_paths(resolve_call(config, given))
            self.path = run_dir(self.config).path
            self._folder_of_call = Path.cwd()
        if isinstance(observers, Observer):
            raise UsageError("observers: a single Observer", hint="write observers=[observer]")
        observers = list(observers)
        if wrong := [observer for observer in observers if not isinstance(observer, Observer)]:
            raise UsageError(f"observers: {wrong[0]!r} is not an ssdctl.Observer")
        self._process: int | None = None  # that has opened it
        self.step = self.samples_seen = 0
        self.evaluation: Evaluation | None = None
        self._thresholds: Sequence[float | None] = ()  # of the last evaluation
        self._scored: tuple[int, Evaluation, bool] | None = None  # is not recorded yet
        self._new_evaluation: Evaluation | None = None  # since the last step that was yielded
        self._new_report: Step | None = None  # since then
        displays = [observer for observer in observers if isinstance(observer, Display)]
        self._display = displays[0] if displays else log_display(progress=progress)
        self._given = observers if displays else [self._display, *observers]
        self._observers = Observers()
        self._state: Literal["new", "open", "closed"] = "new"
        self._resources = contextlib.ExitStack()
        self._loop: Callable[[], Generator[Step, None, None] | None] = lambda: None

    @public_call()
    def open(self) -> None:
        """Open device, ranks, dataset, network and run folder, unless they are open.

        Raises:
            ssdctl.errors.UsageError: A setting or the device cannot be used, another process
                trains in the run folder, or the trainer was closed.
            ssdctl.errors.DataError: The dataset cannot be used.
            ssdctl.errors.IntegrityError: The checkpoint to continue from is damaged.
            ssdctl.errors.DistributedError: Another rank was lost.
            ssdctl.errors.Stopped: A signal came.
        """
        if self._state == "open":
            return
        self._require("new")
        if Path.cwd() != self._folder_of_call:
            self.config = with_paths_from(self._folder_of_call, self.config)
        self._process = os.getpid()
        with contextlib.ExitStack() as resources, signals.handled():
            self._open(resources)
            self._resources = resources.pop_all()
        self._state = "open"

    def _open(self, resources: contextlib.ExitStack) -> None:
        # Late: the loop needs no formats and downloads.
        from ssdctl.training import setup
        from ssdctl.training.memory import out_of_memory_hints

        config, train = self.config, self.config.train
        ranks = find_ranks()
        with failing_together(), signals.ending_at_once():
            opened = opened_device(train.device, ranks, train.execution, tf32=train.tf32)
            self.device = device = resources.enter_context(opened)
        resources.enter_context(setup.deterministic_kernels(train.deterministic))
        resources.enter_context(without_dynamo())
        group = process_group(ranks, device, train.rank_timeout)
        self.ranks = ranks = resources.enter_context(group)
        for notice in device.notices:
            log.warning("%s", notice)
        with signals.ending_at_once():
            init = setup.init_reader(config)
            progress = self._display.progress if ranks.is_main else without_progress
            config, splits = setup.open_dataset(config, device, ranks, progress, init)
            self.plan = setup.plan_run(config, splits, device, ranks)
            self.path, self.splits = self.plan.out, setup.limited(splits, self.plan)
            self.threads = train.workers or usable_cores(ranks.world_size)
            self.model = setup.build_network(self.plan, self.splits, device, ranks)
            architecture = self.model.architecture
            self.memory_hints = functools.partial(
                out_of_memory_hints, self.plan, architecture, device
            )
            if ranks.is_main:
                resources.enter_context(exclusive_run(self.path))
                CheckpointFolder(self.path, train.keep).repair()
            checkpoint = find_checkpoint(self.plan, self.splits.train.classes, ranks)
            if checkpoint is None:
                setup.load_first_weights(self.plan, self.model, splits, ranks, init)
            else:  # the weights that the run began with
                first = checkpoint.config.get("train.init")
                self.plan = self.plan.with_value("train.init", first)
            del init  # its memory
            # The program may change its folder; `path` is for messages.
            self.plan = dataclasses.replace(self.plan, out=self.path.absolute())
            self._open_state(checkpoint)
            resources.callback(_call, weakref.WeakMethod(self._abort))
            self._start_observers(setup.observers_of(self.plan))
        setup.warn_about(self.plan, self.splits, self.step)

    def _open_state(self, checkpoint: Checkpoint | None) -> None:
        config, plan, ranks = self.plan.config.train, self.plan, self.ranks
        self.train_step = build_step(self.model, config, self.device, plan.precision, ranks)
        self.optimizer = self.train_step.optimizer
        self.ema = EMA(self.model, config.ema) if config.ema else None
        self.statistics = RankStatistics(self.model, self.ema, ranks)
        if checkpoint is not None:
            self.load_state(checkpoint)
        self.saver = Saver(plan, ranks)
        self.saver.start(self.step, checkpoint)
        self._folder = FolderWriter(plan, self.step) if ranks.is_main else None
        self._open_evaluator(checkpoint)
        self._evaluated_before = self.evaluator.evaluated_step
        self._update_links()
        self.input = StepInput(plan, self.splits.train, self.device, ranks, self.threads)
        self.recorder = StepRecorder(plan, self.splits.train, self.device, ranks, self.memory_hints)
        self.recorder.bad_images.start(self._past())
        self.meter = self.recorder.meter
        self.epochs = EpochTimer(plan, self.meter, self.step)
        self.flags = collectives.FlagExchange(ranks)
        profile = RunDir(plan.out).profile
        self.profiler = StepProfiler(config.profile, profile, self.device, ranks)

    def _open_evaluator(self, checkpoint: Checkpoint | None) -> None:
        past = self._past_with_weights()
        best_ap = None if checkpoint is None else checkpoint.best_ap
        is_complete = len(past) == len(self._past_evaluations())
        if not (self.ranks.is_main and is_complete and RunDir(self.plan.out).best.exists()):
            best_ap = None
        self.evaluator = Evaluator(
            self.plan,
            self.model,
            self.splits,
            self.device,
            self.ranks,
            self.threads,
            past=past,
            best_ap=best_ap,
        )
        self.evaluator.rewind(self._past_evaluations())

    def _start_observers(self, observers: Sequence[Observer]) -> None:
        if self._folder is None:
            return
        start = Start(
            self.step,
            self.plan,
            self.device.label,
            self.ranks.world_size,
            self.threads,
            self.splits.train,
            self.splits.val,
            len(self.splits.scored_rows),
            self._past(),
        )
        self._observers.start([self._folder, *observers, *self._given], start)

    def __iter__(self) -> Iterator[Step]:
        """Train and yield a record of each step after it.

        Raises:
            ssdctl.errors.Stopped: Interrupted; everything is saved, and the trainer is closed.
            ssdctl.errors.NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
            ssdctl.errors.DataError: The images cannot be read; the steps before are saved.
            ssdctl.errors.DiskError: The store cannot be read, or a checkpoint cannot be written.
            ssdctl.errors.UsageError: The trainer is closed.
        """
        self._leave_loop()
        loop = self._iterate()
        self._loop = weakref.ref(loop)  # `break` frees it, which restores the signal handlers
        return loop

    @public_iterator
    def _iterate(self) -> Generator[Step, None, None]:
        self.open()
        try:
            with (
                signals.handled(),
                contextlib.closing(self.input),
                contextlib.closing(self.profiler),
            ):
                yield from self._train()
            # The others may evaluate the checkpoint that the first rank writes.
            collectives.barrier(self.ranks)
        except GeneratorExit:  # the loop was left
            raise
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        self.__exit__(None, None, None)

    def _train(self) -> Generator[Step, None, None]:
        self.input.start(self.samples_seen, self.plan.total_steps - self.step)
        self.model.train()
        self.meter.start()
        requests = self._exchange_requests(wait=True)
        self._handle(requests)
        if self.step > 0 and self.evaluator.is_due(self.step):
            with self.meter.paused():
                self._evaluate()  # the run was stopped before this evaluation
        while self.step < self.plan.total_steps and not requests.end:
            batches = self._next_batches()
            requests = self._exchange_requests()
            self._handle(requests)
            if requests.end:
                break
            step = self._take_step(batches)
            self._end_step(step)
            is_last = self.step == self.plan.total_steps
            with self.meter.paused():
                self.profiler.after(self.step, is_last=is_last)
                if self.saver.is_due(self.step):
                    self._save()
                if self.evaluator.is_due(self.step):
                    self._evaluate()
                if self.saver.is_requested:
                    self._save(is_scheduled=False)
                if is_last:
                    self._record_evaluation(wait=True)
            self.meter.mark()
            yield self._with_news(step)
        if requests.end and (reason := self.evaluator.early_stopping.reason_to_end()):
            log.info("%s", reason)
        self._finish()

    @public_call()
    def run(self) -> Run:
        """Train to the last step of the schedule, or to the target AP.

        Raises:
            ssdctl.errors.SsdctlError: See `__iter__`.
        """
        for _ in self:
            pass
        has_moved = self.path.absolute() != self.plan.out  # the program, to another folder
        return Run(self.plan.out if has_moved else self.path)

    @public_call()
    def save(self) -> None:
        """Save a checkpoint of this step. Under torchrun every rank calls it.

        Raises:
            ssdctl.errors.DiskError: It cannot be written.
            ssdctl.errors.NonFiniteError, ssdctl.errors.DataError: See `__iter__`.
            ssdctl.errors.UsageError: The trainer is not open.
        """
        self._require("open")
        with self._failing_together():
            self._record_pending()
            self._save(is_scheduled=False)
            self.saver.wait()
            collectives.barrier(self.ranks)

    @public_call()
    def evaluate(self) -> Evaluation | None:
        """Evaluate the network on the validation images, save it, and wait for the score.

        Under torchrun every rank calls it; those other than the first return None. A step that a
        resumed run has evaluated before is neither recorded nor counted for `patience` again.

        Raises:
            ssdctl.errors.UsageError: The trainer is not open, or has no validation images.
            ssdctl.errors.NonFiniteError: An output of the network is NaN or infinite, or see
                `__iter__`.
            ssdctl.errors.DataError: See `__iter__`.
        """
        self._require("open")
        if self.splits.val is None:
            raise UsageError(f"{self.path}: no validation images to evaluate on")
        with self._failing_together():
            self._record_pending()
            with self.meter.paused():
                if self.evaluator.detected_step != self.step:
                    self._evaluate()
                self._record_evaluation(wait=True)
        return self.evaluation

    def state(self, rank_statistics: list[list[Tensor]] | None = None) -> Checkpoint:
        """Return what a checkpoint contains. Its tensors are the run's: copy them before a step.

        Args:
            rank_statistics: Batch norm's of each rank, where `model` has their average.
        """
        plan, trained = self.plan, self.model.state_dict()
        return Checkpoint(
            path=RunDir(self.path).step_checkpoint(self.step),
            model=trained if self.ema is None else dict(self.ema.state()),
            trained=None if self.ema is None else trained,
            architecture=self.model.architecture,
            classes=self.splits.train.classes,
            thresholds=self._thresholds,
            config=snapshot(plan.config),
            step=self.step,
            epoch=plan.epoch(self.step),
            samples_seen=self.samples_seen,
            images=plan.images,
            global_batch=plan.global_batch_size,
            best_ap=self.evaluator.early_stopping.ap,
            optimizer=self.optimizer.state_dict(),
            rank_statistics=rank_statistics,
        )

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
        self._thresholds = checkpoint.thresholds

    @public_call()
    def summary(self) -> Summary:
        """Return the position, the best AP and the pace of this start.

        Raises:
            ssdctl.errors.UsageError: The trainer was not opened.
        """
        if not hasattr(self, "meter"):
            self._require("open")
        return Summary(
            out=str(self.path),
            step=self.step,
            images_per_second=round(self.meter.images_per_second, 2),
            best_ap=self.evaluator.early_stopping.ap,
            peak_memory_bytes=self.device.peak_memory_bytes(),
            total_s=round(self.meter.total_s, 3),
            data_wait=round(self.meter.data_wait, 4),
        )

    @public_call()
    def close(self) -> None:
        """Release the run folder and the process group; what was not saved is lost.

        Raises:
            ssdctl.errors.UsageError: An observer calls it, or it is called during a step.
        """
        if self._observers.is_calling or self._is_in_step():
            raise UsageError(
                f"{self.path}: this trainer cannot be closed by an observer, or during a step",
                hint="leave the loop over its steps, or let the observer raise an exception",
            )
        self.__exit__(None, None, None)

    def __enter__(self) -> Trainer:
        self.open()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._process not in (None, os.getpid()):  # the end of a process that was forked since
            return
        self._leave_loop()
        self._state = "closed"
        self._resources.pop_all().__exit__(*error)

    def __repr__(self) -> str:
        total = f" of {self.plan.total_steps}" if self._state == "open" else f", {self._state}"
        return f"Trainer({self.path}: step {self.step}{total})"

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Close the trainer on all ranks if the block fails on this one."""
        try:
            yield
        except BaseException:
            if not self.ranks.is_single_process:
                self.__exit__(*sys.exc_info())
            raise

    def _leave_loop(self) -> None:
        """End the loop in progress, its decode threads and its signal handlers."""
        loop, is_in_step = self._loop(), self._is_in_step()
        if loop is not None and not is_in_step:
            loop.close()
        self._loop = lambda: None

    def _is_in_step(self) -> bool:
        loop = self._loop()
        return loop is not None and inspect.getgeneratorstate(loop) == inspect.GEN_RUNNING

    def _require(self, state: str) -> None:
        if self._state == state:
            return
        if self._state == "new":
            raise UsageError(
                f"{self.path}: this trainer is not open", hint="use `with Trainer(...) as trainer:`"
            )
        raise UsageError(
            f"{self.path}: this trainer is closed",
            hint="a new Trainer with the same settings continues the run",
        )

    def _past(self) -> Sequence[dict[str, Any]]:
        """Return the records before this start, or before a rollback; on the first rank."""
        return () if self._folder is None else self._folder.past

    def _past_evaluations(self) -> list[dict[str, Any]]:
        return [record for record in self._past() if record["kind"] == "eval"]

    def _past_with_weights(self) -> list[dict[str, Any]]:
        """Return the evaluations, without better ones of weights that are gone.

        The best weights may be deleted or damaged, or of a branch that the run left.
        """
        past, steps = self._past_evaluations(), self._steps_with_weights()
        best = max((r["AP"] for r in past if r["step"] in steps), default=-1.0)
        return [r for r in past if r["step"] in steps or r["AP"] <= best]

    def _steps_with_weights(self) -> set[int | None]:
        if self._folder is None:  # the first rank has the records
            return set()
        return {*map(step_of, self.saver.steps()), self.saver.step_of_best()}

    def _update_links(self) -> None:
        """Bring best.pt, last.pt, evaluation.json and `keep` up to date with the records."""
        steps = self._steps_with_weights()
        best = best_evaluation([r for r in self._past_evaluations() if r["step"] in steps])
        # The best AP of a checkpoint whose record was lost is not of a known step.
        if best and best["AP"] == self.evaluator.early_stopping.ap:
            self.saver.best_step = best["step"]
        if self.ranks.is_main:
            self.saver.update()

    def _next_batches(self) -> list[Batch]:
        self.profiler.before(self.step + 1)
        with torch.profiler.record_function("wait: next batch"), self.meter.waiting():
            return self.input.next()

    def _take_step(self, batches: Sequence[Batch]) -> Step:
        began = time.time()
        with self.memory_hints():
            result = self.train_step(batches, self.plan.lr(self.step))
        self.step += 1
        self.samples_seen += self.plan.global_batch_size
        if self.ema is not None:
            self.ema.update()
        is_scheduled = self.saver.is_due(self.step) or self.evaluator.is_due(self.step)
        is_saved = is_scheduled or self.saver.is_requested
        return self.recorder.record(self.step, began, batches, result, is_saved=is_saved)

    def _with_news(self, step: Step) -> Step:
        """Return a step with what was scored and reported since the previous one was yielded."""
        step, self._new_evaluation = step._replace(evaluation=self._new_evaluation), None
        report, self._new_report = self._new_report, None
        if report is None:
            return step
        bad_images = [*report.bad_images, *step.bad_images]
        return step._replace(bad_images=bad_images, skipped=[*report.skipped, *step.skipped])

    def _end_step(self, step: Step) -> None:
        """Tell the observers; end the run or roll it back if too much went wrong."""
        self._observers.tell(lambda observer: observer.on_step(step))
        self._check_problems(step)
        if (epoch := self.epochs.ended_at(self.step)) is not None:
            self._observers.tell(lambda observer: observer.on_epoch(epoch))

    def _record_pending(self) -> None:
        """Record the steps since the last log point, which a resumed run does not repeat."""
        self.meter.start()  # an evaluation, or a loop that was left, does not count
        if (step := self.recorder.take_pending()) is not None:
            self._new_report = step
            self._observers.tell(lambda observer: observer.on_report(step))
            self._check_problems(step)

    def _check_problems(self, step: Step) -> None:
        with self._saved_before_an_error():
            self.recorder.bad_images.check()
        folder = str(RunDir(self.path).nonfinite)
        if step.skipped and self.recorder.guard.should_roll_back(step.skipped, folder):
            with self.meter.paused():
                self._roll_back()

    def _has_trained(self) -> bool:
        return self.meter.images > 0

    def _exchange_requests(self, *, wait: bool = False) -> Requests:
        """Return what any rank asks for.

        Args:
            wait: Wait for the other ranks' requests. Otherwise those of the previous call are
                returned, which costs no time.
        """
        self.saver.check()
        self._record_evaluation(wait=False)
        own = Requests(
            stop=signals.stop_requested() is not None,
            check_input=self.input.has_failed,
            save=self._has_trained() and self.saver.is_due_by_clock(),
            end=self.evaluator.early_stopping.reason_to_end() is not None,
        )
        exchange = self.flags.settle if wait else self.flags.exchange
        return Requests(*exchange(own))

    def _handle(self, requests: Requests) -> None:
        if requests.stop:
            self._stop()
        if requests.check_input:
            with self._saved_before_an_error():
                collectives.run_and_gather(self.input.check, self.ranks)
        self.saver.is_requested |= requests.save

    def _stop(self) -> None:
        signal_name = signals.stop_requested()
        self._record_pending()
        self._record_evaluation(wait=True)
        self._save(is_scheduled=False)
        self.saver.wait()
        self._end("stopped", signal_name)
        # mpirun ends the other ranks soon after the first exits: not during a save.
        collectives.barrier(self.ranks)
        is_same = self.plan.config.train.resume != "never"
        raise Stopped(
            f"stopped by {signal_name or 'another rank'} at step {self.step}/"
            f"{self.plan.total_steps}; progress saved in {self.path}",
            hint=f"run the same command again{'' if is_same else ' with --resume auto'} "
            "to continue",
        )

    def _save(self, *, is_scheduled: bool = True) -> None:
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
        with self.statistics.averaged(self.step) as of_ranks:
            self.saver.save(self.state(of_ranks))

    @contextlib.contextmanager
    def _saved_before_an_error(self) -> Iterator[None]:
        """Save the steps so far if the block, on all ranks alike, cannot read the data."""
        try:
            yield
        except (DataError, DiskError):
            self._record_pending()
            self._save(is_scheduled=False)
            self.saver.wait()
            raise

    def _evaluate(self) -> None:
        """Detect on the validation split and save; the score comes while the next steps run.

        The observers are not told about another evaluation of the same step.
        """
        self._record_evaluation(wait=True)
        is_repeated = self.evaluator.evaluated_step == self.step
        if not is_repeated:
            self._observers.tell(lambda observer: observer.on_evaluation_start(self.step))
        self.statistics.average(self.step)
        average = contextlib.nullcontext() if self.ema is None else self.ema.in_place()
        with self._saved_before_an_error(), average:
            detections = self.evaluator.detect()
        if collectives.any_rank([signals.stop_requested() is not None], self.ranks)[0]:
            # Stops: not all images were evaluated; the resumed run evaluates again.
            self._handle(self._exchange_requests(wait=True))
        if not is_repeated and detections is not None and self.splits.val is not None:
            val, rows = self.splits.val, self.splits.scored_rows
            detected = Detected(self.step, val, rows, detections)
            self._observers.tell(lambda observer: observer.on_detections(detected))
        self.evaluator.evaluated_step = self.evaluator.detected_step = self.step
        self.evaluator.is_repeated = is_repeated
        self._thresholds = ()  # this step's are not known yet
        self._save()
        if detections is not None:
            self.evaluator.start_scoring(detections, self.step)

    def _record_evaluation(self, *, wait: bool) -> None:
        if self._scored is None and (scored := self.evaluator.scored(wait=wait)) is not None:
            evaluation, step = scored[0], scored[0].about.step
            assert step is not None
            self.evaluation = self._new_evaluation = evaluation
            self._thresholds = thresholds = evaluation.thresholds(self.splits.train.classes)
            self.saver.set_thresholds(step, thresholds)
            self._scored = step, *scored
        if self._scored is None:
            return
        if wait:
            self.saver.wait()
        # The record comes after the thresholds: an evaluation without one is repeated.
        if not self.saver.check():
            return
        (step, evaluation, is_best), self._scored = self._scored, None
        if self.evaluator.is_repeated:
            return
        record = Scored(step, evaluation, self.evaluator.losses, is_best)
        try:  # the first observer writes the record; another one may end the run
            self._observers.tell(lambda observer: observer.on_evaluation(record))
        finally:
            if is_best:
                self.saver.mark_best(step)
        if is_best:
            self._tell_checkpoint("best", step)

    def _tell_checkpoint(self, name: Literal["best", "last"], step: int) -> None:
        folder = RunDir(self.plan.out)
        saved = Saved(step, name, folder.best if name == "best" else folder.last)
        self._observers.tell(lambda observer: observer.on_checkpoint(saved))

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
        rewind = Rewind(self.step, bad_step)
        self._observers.tell(lambda observer: observer.on_rewind(rewind))
        self.recorder.rewind(self._past())
        self.epochs.rewind(self.step)
        self.evaluator.rewind(self._past_evaluations())
        self._update_links()
        self._save()  # so that a resumed run skips the offending images too
        text = "rolled back to %s (step %d); the next images follow"
        log.warning(text, checkpoint.path, self.step)

    def _finish(self) -> None:
        # A signal that came in the meantime is handled.
        self._handle(self._exchange_requests(wait=True))
        self._record_pending()
        self._record_evaluation(wait=True)
        self._save()
        self.saver.wait()
        self._tell_checkpoint("last", self.step)
        self._end("finished")

    def _abort(self) -> None:
        """Finish the save in progress, whatever ended the run."""
        self.saver.close()
        with contextlib.suppress(DiskError):
            self._end("failed")

    def _end(self, outcome: Outcome, signal_name: str | None = None) -> None:
        has_evaluated = self.evaluator.evaluated_step != self._evaluated_before
        ends = [r["event"] for r in self._past() if r.get("event") in ("stopped", "finished")]
        was_stopped = outcome == "finished" and ends[-1:] == ["stopped"]  # with nothing left to do
        has_progressed = self._has_trained() or has_evaluated or was_stopped
        self._observers.end(End(self.step, outcome, self.summary(), signal_name, has_progressed))


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (bound := method()) is not None:
        bound()
