"""Observers of a run. The run folder, the display, MLPerf's log and the trackers are observers.

class Printer(Observer):
    def on_evaluation(self, scored: Scored) -> None:
        print(scored.step, scored.evaluation.metrics["AP"])

ssdctl.train("photos", observers=[Printer()])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ssdctl.runs.metrics import Record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ssdctl.data.store import Split
    from ssdctl.evaluation.coco_ap import Detections
    from ssdctl.input.batch import BadImage
    from ssdctl.runs.evaluation import Evaluation
    from ssdctl.training.plan import Plan
    from ssdctl.training.step import BadStep, StepResult


class Start(NamedTuple):
    """A run before the first step of this start."""

    step: int  # from which it continues; 0: a new run
    plan: Plan
    device: str  # such as `NVIDIA H100`
    world_size: int
    threads: int  # that decode images, on each rank
    train: Split
    val: Split | None
    val_images: int  # images of `val` that are evaluated
    past: Sequence[Record]  # metrics.jsonl up to `step`

    def best_evaluation(self) -> Record:
        """Return the evaluation with the highest AP before this start; empty without one."""
        return best_evaluation(self.past)


def best_evaluation(records: Sequence[Record]) -> Record:
    """Return the evaluation with the highest AP among records; empty without one."""
    scored = [record for record in records if record["kind"] == "eval" and record["AP"] >= 0]
    return max(scored, key=lambda record: record["AP"], default={})


class StepMetrics(NamedTuple):
    """The metrics at a log point. The losses are means over the ranks."""

    loss: float
    loss_box: float
    loss_class: float
    lr: float
    images_per_second: float  # since the previous log point
    grad_norm: float
    data_wait: float  # fraction of the time spent waiting for images
    memory_bytes: int  # the peak on the device


class Step(NamedTuple):
    """A step that was trained."""

    step: int  # optimizer steps so far, this one included
    epoch: float
    lr: float
    began: float  # seconds since 1970
    result: StepResult  # on the device
    metrics: StepMetrics | None = None  # at a log point
    is_input_bound: bool = False  # the device waited for images; true once in a run
    bad_images: Sequence[BadImage] = ()  # replaced since the previous report
    skipped: Sequence[BadStep] = ()  # skipped since the previous report
    evaluation: Evaluation | None = None  # scored since the previous step

    @property
    def loss(self) -> float:
        """The loss of this rank's images. Reading it waits for the device."""
        return float(self.result.losses.total)

    def __repr__(self) -> str:
        return f"Step({self.step}, epoch {self.epoch:.2f}, lr {self.lr:.3g})"


class Epoch(NamedTuple):
    """An epoch that ended with a step; the first one after a resume began there."""

    step: int
    epoch: int  # epochs that have ended
    duration_s: float
    images_per_second: float


class Detected(NamedTuple):
    """The detections of an evaluation, which is scored while the next steps are trained."""

    step: int
    split: Split
    rows: NDArray[np.int64]  # of the split: the images
    detections: Detections


class Scored(NamedTuple):
    """An evaluation of the network after a step."""

    step: int
    evaluation: Evaluation
    losses: dict[str, float]  # on the validation images: `loss`, `loss_box`, `loss_class`
    is_best: bool


class Saved(NamedTuple):
    """A checkpoint that became the best, or the last of a run that has ended."""

    step: int
    name: Literal["best", "last"]
    path: Path


class Rewind(NamedTuple):
    """A return to a checkpoint, from which the next images are trained on."""

    step: int
    from_step: int


class Summary(NamedTuple):
    """A run, and the pace of this start."""

    out: str
    step: int
    images_per_second: float
    best_ap: float | None
    peak_memory_bytes: int
    total_s: float
    data_wait: float  # fraction of the training time spent waiting for images


Outcome = Literal["finished", "stopped", "failed"]  # `failed`: also a loop that was left


class End(NamedTuple):
    """The end of a start."""

    step: int
    outcome: Outcome
    summary: Summary
    signal: str | None = None  # that stopped this rank
    has_progressed: bool = True  # this start trained or evaluated

    @property
    def is_success(self) -> bool:
        return self.outcome == "finished"


class Observer:
    """Base class of observers; its methods do nothing. They are called on the first rank only.

    They run between two steps, so training waits for them, and an exception ends it.
    """

    def on_start(self, start: Start) -> None:
        """Handle the start or resume of a run."""

    def on_step(self, step: Step) -> None:
        """Handle a step. `step.metrics` is set at log points (`--log-every`)."""

    def on_report(self, step: Step) -> None:
        """Handle the metrics and problems of the last step, recorded before an unplanned save.

        A signal, an early end, `Trainer.save` and `Trainer.evaluate` save between log points.
        """

    def on_epoch(self, epoch: Epoch) -> None:
        """Handle the end of an epoch."""

    def on_evaluation_start(self, step: int) -> None:
        """Handle the start of an evaluation."""

    def on_detections(self, detected: Detected) -> None:
        """Handle the detections of an evaluation, before they are scored."""

    def on_evaluation(self, scored: Scored) -> None:
        """Handle the score of an evaluation, some steps after its detections."""

    def on_checkpoint(self, saved: Saved) -> None:
        """Handle a new best checkpoint, or the last one of a finished run."""

    def on_rewind(self, rewind: Rewind) -> None:
        """Handle a rollback (`--on-nonfinite rollback`): later steps are trained again."""

    def on_end(self, end: End) -> None:
        """Handle the end of a start, whatever ended it."""


class Observers:
    """The observers of a run that were started, on the first rank."""

    def __init__(self) -> None:
        self._started: list[Observer] = []
        self.is_calling = False

    def start(self, observers: Sequence[Observer], start: Start) -> None:
        with self._calling():
            for observer in observers:
                self._started.append(observer)
                observer.on_start(start)

    def tell(self, call: Callable[[Observer], None]) -> None:
        with self._calling():
            for observer in self._started:
                call(observer)

    def end(self, end: End) -> None:
        """End all, also if one fails; later calls do nothing. It takes a limited time."""
        started, self._started = self._started, []
        with self._calling(), ExitStack() as stack:
            for observer in reversed(started):
                stack.callback(observer.on_end, end)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        before, self.is_calling = self.is_calling, True
        try:
            yield
        finally:
            self.is_calling = before
