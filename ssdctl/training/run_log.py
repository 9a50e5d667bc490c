"""Record the progress of a run: metrics.jsonl, terminal, trackers, MLPerf's log.

Every rank calls the methods, since some of them gather from all ranks. The first rank writes
records of these kinds to metrics.jsonl and shows them:

    train, epoch, eval, event

All records reach the trackers and MLPerf's log, and some are for them or the display only: `start`
(what the run is about to do), `begin` (a step), `position` (after a step, and before and after an
evaluation), `detections`, `checkpoint` (best or last), `rewind` (to a step, after which all is
trained again), `end`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ssdctl.config.render import snapshot_sources, to_snapshot_toml
from ssdctl.distributed import collectives
from ssdctl.errors import DataError
from ssdctl.files import write_text
from ssdctl.input.batch import BadImage, Batch
from ssdctl.runs.environment import Environment, find_environment, write_environment
from ssdctl.runs.evaluation import Evaluation, write_evaluation
from ssdctl.runs.layout import RunDir, evaluation_of
from ssdctl.runs.metrics import MetricsFile, Record, open_run
from ssdctl.training.description import describe_run
from ssdctl.training.mllog import MLLog
from ssdctl.training.step import BadStep
from ssdctl.training.trackers import open_trackers

if TYPE_CHECKING:
    from ssdctl.data.store import Split
    from ssdctl.training.setup import OpenedRun

log = logging.getLogger(__name__)
Observer = Callable[[Record], None]

WRITTEN = ("train", "epoch", "eval", "event")  # kinds of records in metrics.jsonl
SHOWN = (*WRITTEN, "start", "position")
INPUT_BOUND_WAIT = 0.2  # fraction of the time spent waiting for images
INPUT_BOUND_LAPS = 3  # in a row
MIN_LIMIT = 10  # images that cannot be decoded, and as a fraction of the training images
LIMIT_FRACTION = 0.01
WARM_UP_LAPS = 2  # the first ones fill buffers, compile and tune


class Lap(NamedTuple):
    """The steps since the previous lap."""

    images_per_second: float
    data_wait: float  # fraction of the time
    is_input_bound: bool  # the device waited for the input in the last laps; true only once


class ThroughputMeter:
    """Measures images per second and the time waiting for images, without evaluations and saves."""

    def __init__(self, global_batch: int) -> None:
        self._global_batch = global_batch
        self._started = self._lap_began = time.monotonic()
        self.images = self._lap_images = 0
        self._spent_s = self._waited_s = 0.0  # over the finished laps
        self._lap_waited_s = 0.0
        self._laps = self._slow_laps = 0
        self._was_input_bound = False

    def start(self) -> None:
        self._lap_began = time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as waiting for images."""
        began = time.monotonic()
        yield
        self._lap_waited_s += time.monotonic() - began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._lap_began += time.monotonic() - began

    def step_done(self) -> None:
        self._lap_images += self._global_batch
        self.images += self._global_batch

    def lap(self) -> Lap:
        """End a lap, at a point where the device has finished its steps."""
        now = time.monotonic()
        spent = max(now - self._lap_began, 1e-9)
        rate, data_wait = self._lap_images / spent, self._lap_waited_s / spent
        self._spent_s += spent
        self._waited_s += self._lap_waited_s
        self._laps += 1
        is_slow = self._laps > WARM_UP_LAPS and data_wait > INPUT_BOUND_WAIT
        self._slow_laps = self._slow_laps + 1 if is_slow else 0
        is_input_bound = self._slow_laps == INPUT_BOUND_LAPS and not self._was_input_bound
        self._was_input_bound |= is_input_bound
        self._lap_began, self._lap_images, self._lap_waited_s = now, 0, 0.0
        return Lap(rate, data_wait, is_input_bound)

    @property
    def training_s(self) -> float:
        """Seconds of training so far, without the paused blocks."""
        return self._spent_s + max(time.monotonic() - self._lap_began, 0.0)

    @property
    def images_per_second(self) -> float:
        return self.images / self._spent_s if self._spent_s else 0.0

    @property
    def data_wait(self) -> float:
        return self._waited_s / self._spent_s if self._spent_s else 0.0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._started


def _images_of(train: Split) -> Record:
    """Return what `prepare` decides about the pixels that a run is trained on."""
    ids = train.image_ids[train.trainable].tobytes()
    return {
        "encoding": "raw" if train.is_raw else "jpeg",
        "shrink": train.shrink or "off",
        "image_ids": hashlib.sha256(ids).hexdigest()[:12],
    }


class RunLog:
    def __init__(self, opened: OpenedRun, start_step: int, emit: Observer) -> None:
        plan = opened.plan
        self._opened, self._emit = opened, emit
        self._folder = RunDir(opened.plan.out)
        self.throughput = ThroughputMeter(plan.global_batch_size)
        self._epochs_ended = int(plan.epoch(start_step))
        self._epoch_began = time.monotonic(), 0.0, 0  # with seconds and images of training
        self._max_bad_images = max(MIN_LIMIT, int(LIMIT_FRACTION * plan.images))
        self._new_bad_images: dict[int, BadImage] = {}  # on this rank, by image id
        self._bad_image_ids: set[int] = set()  # recorded, on all ranks
        self._observers: list[Observer] = []
        self._metrics: MetricsFile | None = None  # on the first rank
        self._is_described = not opened.ranks.is_main  # config.toml is of this start
        self._best_step: int | None = None  # an earlier start may not have uploaded it
        if opened.ranks.is_main:
            self._open(start_step)
        self._read_bad_images()

    def _open(self, start_step: int) -> None:
        opened, config = self._opened, self._opened.plan.config.train
        facts = msgspec.to_builtins(self._environment())
        del facts["sources"]  # of settings, which trackers do not show
        self._metrics = open_run(self._folder, start_step)
        if not self._folder.config.exists():
            self._describe()
        if config.tracker or config.tensorboard:
            trackers = open_trackers(opened, start_step, facts, self._metrics.past_records)
            self._observers.append(trackers.record)
        if config.mllog is not None:
            self._observers.append(MLLog(opened, is_resumed=start_step > 0).record)

    def _environment(self) -> Environment:
        device, ranks = self._opened.device, self._opened.ranks
        sources = snapshot_sources(self._opened.plan.config)
        return find_environment(device.label, ranks.world_size, sources)

    def _describe(self) -> None:
        """Write the settings and the environment that the run is trained with."""
        write_text(self._folder.config, to_snapshot_toml(self._opened.plan.config))
        write_environment(self._folder.environment, self._environment())
        self._is_described = True

    def _read_bad_images(self) -> None:
        """Count the images recorded by earlier starts, too, on all ranks."""
        past = [] if self._metrics is None else self._metrics.past_records
        ids: set[int] = {r.get("image_id", 0) for r in past if r.get("event") == "bad_image"}
        self._bad_image_ids = collectives.broadcast(ids, self._opened.ranks)

    def start(self, step: int) -> None:
        opened, plan = self._opened, self._opened.plan
        best, images = self.best_evaluation(), _images_of(opened.train)
        self._warn_of_other_images(images)
        self._best_step = best.get("step")
        self.record("start", step, **describe_run(opened, step), best_ap=best.get("AP"))
        self.event(
            "started",
            step,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            train_images=plan.images,
            val_images=0 if opened.val is None else len(opened.val.image_ids),
            total_steps=plan.total_steps,
            global_batch_size=plan.global_batch_size,
            world_size=opened.ranks.world_size,
            **images,
        )

    def _warn_of_other_images(self, images: Record) -> None:
        """Warn if the dataset was prepared differently since the last start."""
        past = [] if self._metrics is None else self._metrics.past_records
        before = next((r for r in reversed(past) if r.get("event") == "started"), {})
        differences = [
            f"{name} was {before[name]}, is {value}"
            for name, value in images.items()
            if before.get(name, value) != value
        ]
        if differences:
            text = "the dataset was prepared again since the last start: %s"
            log.warning(text, "; ".join(differences))

    def past_evaluations(self) -> list[Record]:
        """Return the evaluations up to the start step, or to the one of `rewind`; on rank 0."""
        past = [] if self._metrics is None else self._metrics.past_records
        return [record for record in past if record["kind"] == "eval"]

    def best_evaluation(self) -> Record:
        """Return the evaluation with the highest AP before this start; empty without one."""
        past = [r for r in self.past_evaluations() if r["AP"] >= 0]
        return max(past, key=lambda r: r["AP"], default={})

    def step_begins(self, step: int, batches: Sequence[Batch]) -> None:
        if not self._is_described:  # a start that trains nothing leaves config.toml as it is
            self._describe()
        for bad in (bad for batch in batches for bad in batch.bad):
            if bad.image_id not in self._bad_image_ids:
                self._new_bad_images.setdefault(bad.image_id, bad)
        self.record("begin", step)

    def losses(self, step: int, values: dict[str, float], lr: float) -> None:
        """Record the values of a step; warn once if training is input-bound."""
        lap = self.throughput.lap()
        data_wait = round(lap.data_wait, 4)
        self.record(
            "train",
            step,
            loss=values["loss"],
            loss_box=values["loss_box"],
            loss_class=values["loss_class"],
            lr=lr,
            images_per_second=round(lap.images_per_second, 3),
            grad_norm=values["grad_norm"],
            data_wait=data_wait,
            memory_bytes=self._opened.device.peak_memory_bytes(),
        )
        if lap.is_input_bound:
            self.event("input_starves", step, data_wait=data_wait)
            log.warning(
                "the device waits for images %.0f%% of the time: use more --workers, or smaller "
                "images (ssdctl prepare --shrink 512)",
                100 * lap.data_wait,
            )

    def bad_images(self, step: int) -> None:
        """Record the images that could not be decoded since the last call, each once per run.

        Each rank's loader replaces its own (ssdctl/input/loader.py).

        Raises:
            DataError: There are too many to trust the data; all ranks decide alike.
        """
        ranks = self._opened.ranks
        if not collectives.any_rank([bool(self._new_bad_images)], ranks)[0]:
            return
        gathered = collectives.gather_to_first(list(self._new_bad_images.values()), ranks)
        shares = collectives.broadcast(gathered, ranks)
        collected = {bad.image_id: bad for share in shares for bad in share}
        self._new_bad_images.clear()
        self._bad_image_ids.update(collected)
        for bad in sorted(collected.values(), key=lambda bad: bad.sample):
            self.event("bad_image", step, **bad._asdict())
            log.warning("image %s was replaced: %s: %s", bad.image_id, bad.file, bad.problem)
        if (count := len(self._bad_image_ids)) > self._max_bad_images:
            raise DataError(
                f"{count} images could not be decoded, the limit is {self._max_bad_images}; "
                "the bad_image events in metrics.jsonl name them",
                hint="fix the dataset; ssdctl prepare --force then checks every image",
            )

    def bad_steps(self, step: int, bad: list[BadStep]) -> None:
        """Record skipped steps, and write their image ids to RUN/nonfinite/."""
        folder = self._folder.nonfinite
        shares = collectives.gather_to_first([entry.image_ids for entry in bad], self._opened.ranks)
        for number, entry in enumerate(bad):
            ids = [i for share in shares for i in share[number]]
            self.event("nonfinite", step, bad_step=entry.step)
            if self._opened.ranks.is_main:
                content = json.dumps({"step": entry.step, "image_ids": ids})
                name, copy = f"step-{entry.step:08d}", 1
                path = folder / f"{name}.json"
                while path.exists() and path.read_text() != content:  # written before a rollback
                    copy += 1
                    path = folder / f"{name}-{copy}.json"
                write_text(path, content)
        text = (
            "%d steps up to step %d had a NaN or infinite loss or gradient and were skipped; "
            "their images are in %s"
        )
        log.warning(text, len(bad), bad[-1].step, folder)

    def epoch(self, step: int) -> None:
        """Record an epoch if it ended with this step; the first after a resume began there."""
        ended, meter = int(self._opened.plan.epoch(step)), self.throughput
        if ended == self._epochs_ended:
            return
        now = time.monotonic(), meter.training_s, meter.images
        duration_s, training_s, images = (
            new - old for new, old in zip(now, self._epoch_began, strict=True)
        )
        self._epochs_ended, self._epoch_began = ended, now
        rate = images / max(training_s, 1e-9)
        self.record(
            "epoch", step, duration_s=round(duration_s, 3), images_per_second=round(rate, 3)
        )

    def event(self, name: str, step: int, **facts: Any) -> None:
        self.record("event", step, event=name, **facts)

    def evaluation(
        self, evaluation: Evaluation, losses: dict[str, float], *, is_best: bool
    ) -> None:
        """Record an evaluation and the AP of each class; keep its details if it is the best."""
        step = evaluation.about.step
        assert step is not None
        if is_best and self._opened.ranks.is_main:
            details = evaluation_of(self._folder.step_checkpoint(step))
            write_evaluation(details, evaluation)  # for the report
        # The record comes last: an evaluation without one is repeated at the next start.
        self.record("eval", step, **evaluation.metrics, **losses)
        self.event("class_ap", step, AP={c.name: c.AP for c in evaluation.per_class})

    def best_checkpoint(self, step: int) -> None:
        self.record("checkpoint", step, name="best", path=self._folder.best)
        self._best_step = None

    def rewind(self, step: int) -> None:
        self.record("rewind", step)
        self._read_bad_images()
        self._epochs_ended = int(self._opened.plan.epoch(step))

    def close(self, step: int, *, is_success: bool) -> None:
        """Close the observers, which takes a limited time. A second call does nothing."""
        if is_success:
            if self._best_step is not None:
                self.record("checkpoint", self._best_step, name="best", path=self._folder.best)
            self.record("checkpoint", step, name="last", path=self._folder.last)
        self.record("end", step, is_success=is_success)
        self._observers.clear()

    def record(self, kind: str, step: int, **values: Any) -> None:
        if self._metrics is None:
            return
        epoch = round(self._opened.plan.epoch(step), 4)
        record = {"kind": kind, "step": step, "epoch": epoch, **values}
        if kind in WRITTEN:
            self._metrics.write(record)
        elif kind == "rewind":
            self._metrics.rewind(step)
        if kind in SHOWN:
            self._emit(record)
        for observer in self._observers:
            observer(record)
