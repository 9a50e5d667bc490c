"""What a tracker implements, and what it receives.

A tracker of another package is a subclass of `Tracker` with an entry point:

    [project.entry-points."ssdctl.trackers"]
    mine = "my_package:MyTracker"       # ssdctl train --tracker mine
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.config.sections import TrainConfig
from ssdctl.errors import UsageError, missing_package
from ssdctl.runs.metrics import Record, is_number
from ssdctl.runtime.packages import entry_point_names, load_entry_point

ENTRY_POINTS = "ssdctl.trackers"
GROUPS = ("train", "eval", "epoch", "class_AP")  # groups of metrics
POSITION = ("kind", "step", "epoch")  # fields of a record that are not figures


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
        """Return the figures up to the start step: a killed run may not have sent all of them."""
        return filter(None, map(metrics_of, self.records))


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


# By module, which has the name of the one that it imports: its class, and the package to install.
BUILT_IN = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("WeightsAndBiases", "wandb"),
    "mlflow": ("MLflow", "mlflow-skinny"),
}


def find_trackers(config: TrainConfig) -> dict[str, type[Tracker]]:
    """Return the trackers that a config names; raise UsageError if one is not installed.

    Their packages are not imported yet.
    """
    names = [*["tensorboard"] * config.tensorboard, *config.tracker]
    return {name: _find(name) for name in dict.fromkeys(names)}


def _find(name: str) -> type[Tracker]:
    if name in BUILT_IN:
        class_name, package = BUILT_IN[name]
        if importlib.util.find_spec(name) is None:
            raise missing_package(package, package)
        tracker = getattr(import_module(f"{__package__}.{name}"), class_name)
    else:
        tracker = load_entry_point(ENTRY_POINTS, name)
    if not (isinstance(tracker, type) and issubclass(tracker, Tracker)):
        names = [*BUILT_IN, *entry_point_names(ENTRY_POINTS)]
        raise UsageError(
            f"--tracker {name}: no such tracker (a subclass of {Tracker.__module__}.Tracker)",
            hint=f"choose from {', '.join(names)}",
        )
    return tracker
