"""What a tracker implements, and what it receives.

A tracker of another package is a subclass of `Tracker` with an entry point:

    [project.entry-points."ssdctl.trackers"]
    mine = "my_package:MyTracker"       # ssdctl train --tracker mine
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.runs.metrics import Record, is_number

ENTRY_POINTS = "ssdctl.trackers"
GROUPS = ("train", "eval", "epoch", "class_AP")  # of figures
POSITION = ("kind", "step", "epoch")  # fields of a record that are not figures


class Metrics(NamedTuple):
    """The figures of one record of metrics.jsonl."""

    group: str  # one of GROUPS
    step: int
    values: dict[str, float]


class TrackedRun(NamedTuple):
    """The run, for a tracker."""

    id: str  # the same whenever the run is resumed
    name: str  # of the run folder
    folder: Path  # the run folder
    start_step: int
    config: dict[str, Any]  # by key, without secrets
    environment: dict[str, Any]  # versions, device, git commit
    records: Sequence[Record]  # of metrics.jsonl up to the start step

    def past_metrics(self) -> Iterator[Metrics]:
        """Return the figures up to the start step: a killed run may not have sent all of them."""
        for record in self.records:
            if (metrics := metrics_of(record)) is not None:
                yield metrics


class Tracker:
    """Receives the progress of a run. The methods of this class do nothing.

    One background thread calls all methods but `abandon`, in the order of the events. They may take
    any time and raise anything: training does not wait, and reports the first error as a warning.
    A step that is trained again after a kill is sent again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run

    def open(self) -> None:
        """Create the tracker's run, or continue the one of `run.id`."""

    def metrics(self, metrics: Metrics) -> None:
        """Add the figures of a step."""

    def pictures(self, step: int, pictures: Mapping[str, NDArray[np.uint8]]) -> None:
        """Add validation images with their detections, (H, W, 3), by image id."""

    def checkpoint(self, name: str, step: int, path: Path) -> None:
        """Upload a checkpoint; `name` is best or last. Only with --upload-checkpoints."""

    def close(self, *, is_success: bool) -> None:
        """End the run, or interrupt it: it may be resumed."""

    def abandon(self) -> None:
        """Make sure that the process can exit; called if the thread does not end in time."""


def metrics_of(record: Record) -> Metrics | None:
    """Return the figures of a record without undefined ones (COCO's -1); None if it has none.

    A loss that is not finite is -1, as in metrics.jsonl.
    """
    group, figures = record["kind"], record
    if group == "event" and record["event"] == "class_ap" and isinstance(record.get("AP"), dict):
        group, figures = "class_AP", record["AP"]
    if group not in GROUPS:
        return None
    values = {
        str(name): float(value) if math.isfinite(value) else -1.0
        for name, value in figures.items()
        if (is_number(value) or (isinstance(value, float) and not math.isfinite(value)))
        and (group == "class_AP" or name not in POSITION)
        and not (group in ("eval", "class_AP") and value < 0)
    }
    return Metrics(group, record["step"], values) if values else None
