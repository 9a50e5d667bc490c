"""Call trackers in background threads, so that none of them can slow down or end a training run."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ssdctl.data.store import Split
from ssdctl.evaluation.coco_ap import Detections
from ssdctl.files import write_text
from ssdctl.inference.drawing import draw
from ssdctl.runs.evaluation import SHOWN_SCORE
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import Record
from ssdctl.runtime.safe_text import redact_urls
from ssdctl.runtime.threads import run_in_daemon_thread
from ssdctl.training.trackers.base import TrackedRun, Tracker, find_trackers, metrics_of

if TYPE_CHECKING:
    from ssdctl.training.run import OpenedRun

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # calls in the queue of a tracker
CLOSE_S = 30.0  # seconds to wait for a tracker at the end
UPLOAD_S = 300.0  # the same if it uploads checkpoints
NUM_IMAGES = 4  # that are drawn

Call = Callable[[Tracker], None]


class BackgroundTracker:
    """Calls a tracker in a daemon thread; drops calls while `max_waiting` are in its queue."""

    def __init__(
        self,
        name: str,
        create: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        max_waiting: int = MAX_WAITING,
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
            self._warn("is slower than training: some of its figures are dropped")

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
        self._has_warned = False  # a reason to warn again: figures are lost
        self._warn(f"did not finish within {timeout_s:.0f} s: its last figures may be missing")
        if self._tracker is not None:
            self._tracker.abandon()

    def _work(self, create: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        try:
            self._tracker = create(run)
            self._tracker.open()
        except BaseException as error:  # SystemExit, too: libraries raise it
            self._warn(f"cannot be used: {_reason(error)}")
            return
        while (call := self._calls.get()) is not None:
            try:
                call(self._tracker)
            except BaseException as error:
                self._warn(f"failed: {_reason(error)}")

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "tracker %s %s; training continues, metrics.jsonl has all figures"
            log.warning(text, self._name, problem)


def _reason(error: BaseException) -> str:
    text = redact_urls(str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def open_trackers(
    opened: OpenedRun, start_step: int, environment: dict[str, Any], records: Sequence[Record]
) -> Trackers:
    run, config = RunDir(opened.run.out), opened.run.config.train
    tracked = TrackedRun(
        id=tracker_id(run),
        name=run.path.resolve().name,
        folder=run.path,
        start_step=start_step,
        config=opened.run.recorded_settings(),
        environment=environment,
        records=records,
    )
    uploads, longest_wait_s = config.upload_checkpoints, config.rank_timeout / 2
    return Trackers(find_trackers(config), tracked, uploads=uploads, longest_wait_s=longest_wait_s)


class Trackers:
    """The trackers of a run.

    Args:
        trackers: What creates each tracker, by name.
        longest_wait_s: Seconds that the end of the run may take; other ranks wait for it.
    """

    def __init__(
        self,
        trackers: Mapping[str, Callable[[TrackedRun], Tracker]],
        run: TrackedRun,
        *,
        uploads: bool = False,
        longest_wait_s: float = UPLOAD_S,
    ) -> None:
        self._trackers = [BackgroundTracker(name, c, run) for name, c in trackers.items()]
        self._uploads = uploads
        self._longest_wait_s = longest_wait_s

    def record(self, record: Record) -> None:
        kind, step = record["kind"], record["step"]
        if kind == "detections":
            images = _first_images(record["split"], record["detections"])
            self._call(lambda tracker: tracker.pictures(step, images))
        elif kind == "checkpoint":
            name, path = record["name"], record["path"]
            if self._uploads and path.is_file():
                self._call(lambda tracker: tracker.checkpoint(name, step, path))
        elif kind == "end":
            is_success, trackers, self._trackers = record["is_success"], self._trackers, []
            timeout_s = UPLOAD_S if self._uploads and is_success else CLOSE_S
            end = time.monotonic() + min(timeout_s, self._longest_wait_s)
            for tracker in trackers:
                remaining_s = max(end - time.monotonic(), 0.1)
                tracker.close(is_success=is_success, timeout_s=remaining_s)
        elif (metrics := metrics_of(record)) is not None:
            self._call(lambda tracker: tracker.metrics(metrics))

    def _call(self, call: Call) -> None:
        for tracker in self._trackers:
            tracker.call(call)


def _first_images(split: Split, detections: Detections) -> dict[str, NDArray[np.uint8]]:
    """Return the first images with their detections, (H, W, 3), by image id."""
    names = {c.id: c.name for c in split.classes}
    numbers = {c.id: number for number, c in enumerate(split.classes, 1)}
    images = {}
    for row in np.nonzero(split.usable)[0][:NUM_IMAGES].tolist():
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
