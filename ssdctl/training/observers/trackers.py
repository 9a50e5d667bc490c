"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, and those of other packages.

A tracker of another package is a subclass of `Tracker` with an entry point:

    [project.entry-points."ssdctl.trackers"]
    mine = "my_package:MyTracker"       # ssdctl train --tracker mine

Trackers are called in background threads, so that none of them can slow down or end a training run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import queue
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.config.render import snapshot
from ssdctl.config.sections import TrainConfig
from ssdctl.errors import missing_package
from ssdctl.files import link_or_copy, write_text
from ssdctl.runs.evaluation import SHOWN_SCORE
from ssdctl.runs.folder import UPLOAD_PREFIX, RunDir, find_environment
from ssdctl.runs.metrics import Record
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import TRACKERS
from ssdctl.runtime.safe_text import redact_urls
from ssdctl.runtime.system import run_in_daemon_thread
from ssdctl.training.observers import (
    Detected,
    End,
    Epoch,
    Observer,
    Rewind,
    Saved,
    Scored,
    Start,
    Step,
)

log = logging.getLogger(__name__)

# The trackers of services.py: the module that each imports, and the package to install.
BUILT_IN = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
GROUPS = ("train", "eval", "epoch", "class_AP")  # groups of metrics
POSITION = ("kind", "step", "epoch")  # fields of a record that are not metrics
MAX_WAITING = 1000  # calls in the queue of a tracker
CLOSE_S = 30.0  # seconds to wait for a tracker at the end
UPLOAD_S = 300.0  # the same if it uploads checkpoints
NUM_IMAGES = 4  # that are drawn


class Metrics(NamedTuple):
    group: str  # one of GROUPS
    step: int
    values: dict[str, float]


class TrackedRun(NamedTuple):
    id: str  # the same whenever the run is resumed
    name: str  # the run folder's
    folder: Path  # the run folder
    start_step: int
    config: dict[str, Any]  # by key, without secrets
    environment: dict[str, Any]  # versions, device, git commit
    records: Sequence[Record]  # metrics.jsonl up to the start step

    def past_metrics(self) -> Iterator[Metrics]:
        """Return the metrics up to the start step: a killed run may not have sent all of them."""
        return filter(None, map(metrics_of, self.records))


class Tracker:
    """Receives the progress of a run. The methods of this class do nothing.

    One background thread calls all methods but `abandon`, in the order of the events. They may take
    any time and raise anything: training does not wait, and reports the first error as a warning.
    A step that is trained again, after a kill or `rewind`, is sent again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def open(self) -> None:
        """Create the tracker's run, or continue the one of `run.id`."""

    def metrics(self, metrics: Metrics) -> None:
        """Add the metrics of a step."""

    def images(self, step: int, images: Mapping[str, NDArray[np.uint8]]) -> None:
        """Add validation images with their detections, (H, W, 3), by image id."""

    def checkpoint(self, name: str, step: int, path: Path) -> None:
        """Upload a checkpoint; `name` is best or last. Only with --upload-checkpoints.

        The file is deleted when this returns.
        """

    def rewind(self, step: int) -> None:
        """Hide what is after a step: training has returned to it after a loss that was NaN."""

    def close(self, *, is_success: bool) -> None:
        """End the run, or interrupt it: it may be resumed."""

    def abandon(self) -> None:
        """Make sure that the process can exit; called if the thread does not end in time."""


def metrics_of(record: Record) -> Metrics | None:
    """Return the metrics of a record without undefined ones (COCO's -1); None if there are none.

    A loss that is not finite is -1, as in metrics.jsonl.
    """
    group, values = record["kind"], {k: v for k, v in record.items() if k not in POSITION}
    if group == "event" and record["event"] == "class_ap" and isinstance(record.get("AP"), dict):
        group, values = "class_AP", record["AP"]
    return _metrics(group, record["step"], values) if group in GROUPS else None


def _metrics(group: str, step: int, values: Mapping[str, Any]) -> Metrics | None:
    sent = {
        str(name): float(value) if math.isfinite(value) else -1.0
        for name, value in values.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and not (group in ("eval", "class_AP") and value < 0)
    }
    return Metrics(group, step, sent) if sent else None


def find_trackers(config: TrainConfig) -> dict[str, type[Tracker]]:
    """Return the trackers that a config names, by name, for messages with a plugin's package.

    Raises:
        UsageError: One is not installed. The packages of our own are not imported yet.
    """
    names = [*["tensorboard"] * config.tensorboard, *config.tracker]
    found = {}
    for name in dict.fromkeys(names):
        tracker, plugin = find_tracker(name), plugins.find(TRACKERS, name)
        found[f"{name} (package {plugin.package})" if plugin else name] = tracker
    return found


def find_tracker(name: str) -> type[Tracker]:
    """Return a tracker; raise UsageError if it is not installed, or a plugin that is none."""
    if name in BUILT_IN and importlib.util.find_spec(name) is None:
        raise missing_package(BUILT_IN[name], BUILT_IN[name])
    loaded, plugin = plugins.load(TRACKERS, name)
    if plugin is not None:
        is_tracker = isinstance(loaded, type) and issubclass(loaded, Tracker)
        plugin.require(is_tracker, f"a subclass of {Tracker.__module__}.Tracker")
    tracker: type[Tracker] = loaded
    return tracker


Create = Callable[[TrackedRun], Tracker]
Call = Callable[[Tracker], None]


class BackgroundTracker:
    """Calls a tracker in a daemon thread; drops calls while `max_waiting` are in its queue."""

    def __init__(
        self, name: str, create: Create, run: TrackedRun, max_waiting: int = MAX_WAITING
    ) -> None:
        self._name = name
        self._calls: queue.Queue[Call | None] = queue.Queue(max_waiting)
        self._tracker: Tracker | None = None
        self._has_warned = False
        self._ended = run_in_daemon_thread(lambda: self._work(create, run))

    def call(self, call: Call) -> None:
        try:
            if not self._ended.done():
                self._calls.put_nowait(call)
        except queue.Full:
            self._warn("is slower than training: some of its metrics are dropped")

    def close(self, *, is_success: bool, timeout_s: float) -> None:
        """Finish the queue and close the tracker; give up after `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        for call in (lambda tracker: tracker.close(is_success=is_success), None):
            try:
                if not self._ended.done():
                    self._calls.put(call, timeout=max(end - time.monotonic(), 0.001))
            except queue.Full:
                break
        if wait([self._ended], timeout=max(end - time.monotonic(), 0)).done:
            return
        self._has_warned = False  # a reason to warn again: metrics are lost
        self._warn(f"did not finish within {timeout_s:.0f} s: its last metrics may be missing")
        if self._tracker is not None:
            self._tracker.abandon()

    def _work(self, create: Create, run: TrackedRun) -> None:
        try:
            self._tracker = create(run)
            self._tracker.open()
        except BaseException as error:  # SystemExit, too: libraries raise it
            self._warn("cannot be used", error)
            return
        while (call := self._calls.get()) is not None:
            try:
                call(self._tracker)
            except BaseException as error:
                self._warn("failed", error)

    def _warn(self, problem: str, error: BaseException | None = None) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        if error is not None:
            reason = redact_urls(str(error)).strip()
            problem += f": {type(error).__name__}" + (f": {reason}" if reason else "")
        text = "tracker %s %s; training continues, metrics.jsonl has all metrics"
        log.warning(text, self._name, problem)


class Trackers(Observer):
    """The trackers of a run.

    Args:
        trackers: What creates each tracker, by name.
        uploads: Send checkpoints, too.
        longest_wait_s: Seconds that the end of the run may take; other ranks wait for it.
    """

    def __init__(
        self,
        trackers: Mapping[str, Create],
        *,
        uploads: bool = False,
        longest_wait_s: float = UPLOAD_S,
    ) -> None:
        self._create = trackers
        self._trackers: list[BackgroundTracker] = []
        self._uploads = uploads
        self._longest_wait_s = longest_wait_s
        self._best: Saved | None = None  # of an earlier start, which may not have uploaded it

    def open(self, run: TrackedRun) -> None:
        self._trackers = [BackgroundTracker(name, c, run) for name, c in self._create.items()]

    def on_start(self, start: Start) -> None:
        run = RunDir(start.plan.out)
        if best := start.best_evaluation():
            self._best = Saved(best["step"], "best", run.best)
        facts = msgspec.to_builtins(find_environment(start.device, start.world_size, {}))
        del facts["sources"]  # of settings
        tracked = TrackedRun(
            id=tracker_id(run),
            name=run.path.resolve().name,
            folder=run.path,
            start_step=start.step,
            config=snapshot(start.plan.config),
            environment=facts,
            records=start.past,
        )
        self.open(tracked)

    def on_step(self, step: Step) -> None:
        if step.metrics is not None:
            self._send("train", step.step, step.metrics._asdict())

    on_report = on_step

    def on_epoch(self, epoch: Epoch) -> None:
        values = {k: v for k, v in epoch._asdict().items() if k not in POSITION}
        self._send("epoch", epoch.step, values)

    def on_detections(self, detected: Detected) -> None:
        images = _first_images(detected)
        self._call(lambda tracker: tracker.images(detected.step, images))

    def on_evaluation(self, scored: Scored) -> None:
        evaluation = scored.evaluation
        self._send("eval", scored.step, {**evaluation.metrics, **scored.losses})
        self._send("class_AP", scored.step, {c.name: c.AP for c in evaluation.per_class})

    def on_checkpoint(self, saved: Saved) -> None:
        if saved.name == "last" and self._best is not None:
            self._upload(self._best)
        self._best = None
        self._upload(saved)

    def on_rewind(self, rewind: Rewind) -> None:
        self._call(lambda tracker: tracker.rewind(rewind.step))

    def on_end(self, end: End) -> None:
        trackers, self._trackers = self._trackers, []
        timeout_s = UPLOAD_S if self._uploads and end.is_success else CLOSE_S
        deadline = time.monotonic() + min(timeout_s, self._longest_wait_s)
        for tracker in trackers:
            remaining_s = max(deadline - time.monotonic(), 0.1)
            tracker.close(is_success=end.is_success, timeout_s=remaining_s)

    def _send(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        if (metrics := _metrics(group, step, values)) is not None:
            self._call(lambda tracker: tracker.metrics(metrics))

    def _upload(self, saved: Saved) -> None:
        if self._uploads and saved.path.is_file():
            time_ns = saved.path.stat().st_mtime_ns
            self._call(lambda tracker: _upload_unless_replaced(tracker, saved, time_ns))

    def _call(self, call: Call) -> None:
        for tracker in self._trackers:
            tracker.call(call)


def _upload_unless_replaced(tracker: Tracker, saved: Saved, time_ns: int) -> None:
    """Upload a checkpoint, unless another one has replaced it since `time_ns`."""
    with TemporaryDirectory(prefix=UPLOAD_PREFIX, dir=saved.path.parent) as folder:
        file = Path(folder, saved.path.name)
        link_or_copy(saved.path, file)  # a best one is replaced by the next during the upload
        if file.stat().st_mtime_ns == time_ns:
            tracker.checkpoint(saved.name, saved.step, file)


def _first_images(detected: Detected) -> dict[str, NDArray[np.uint8]]:
    """Return the first images with their detections, (H, W, 3), by image id."""
    from PIL import Image

    from ssdctl.data.drawing import draw

    _, split, rows, detections = detected
    names = {c.id: c.name for c in split.classes}
    numbers = {c.id: number for number, c in enumerate(split.classes, 1)}
    images = {}
    for row in rows[split.usable[rows]][:NUM_IMAGES].tolist():
        image = Image.fromarray(split.decode(row))
        scale = image.width / split.sizes[row][0]  # below 1 in a store of smaller images
        is_here = detections.image_ids == split.image_ids[row]
        is_shown = is_here & (detections.scores >= SHOWN_SCORE)
        boxes = scale * detections.boxes[is_shown]
        boxes[:, 2:] += boxes[:, :2]
        ids = detections.category_ids[is_shown].tolist()
        labels, shown = [numbers[c] for c in ids], [names[c] for c in ids]
        drawn = draw(image, boxes, labels, shown, detections.scores[is_shown])
        images[str(split.image_ids[row])] = np.asarray(drawn)
    return images


def tracker_id(run: RunDir) -> str:
    path = run.tracker_id
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{32}", text := path.read_text().strip()):
            return text
    write_text(path, (made := uuid.uuid4().hex) + "\n")
    return made
