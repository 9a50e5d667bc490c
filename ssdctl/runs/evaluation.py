"""The result of an evaluation (evaluation.json): metrics, curves, errors, samples.

The report is drawn from this file, so the network need not run again for it.
`ssdctl.evaluation.analysis` computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ssdctl.data.annotations import ClassName, class_texts
from ssdctl.errors import DataError
from ssdctl.files import (
    DECODE_ERRORS,
    msgspec_type,
    read_limited,
    reason_of,
    unreadable,
    write_bytes,
)
from ssdctl.runtime.safe_text import counted, html_table

MAX_BYTES = 1 << 28
SHOWN_SCORE = 0.3  # lowest score of detections in images and confusions, unless chosen
SAMPLE_SCORE = 0.05  # lowest score of detections in samples
CURVES = ("precision", "f1")  # fields of a class that a terminal does not show
Box = tuple[float, float, float, float]  # left, top, width, height in pixels
Interval = tuple[float, float]  # of 95% confidence


def interval_text(intervals: Mapping[str, Interval], name: str) -> str:
    """Return the interval of a metric as ` [.38, .47]`, empty if it has none."""
    if name not in intervals:
        return ""
    low, high = (f"{end:.2f}".removeprefix("0") for end in intervals[name])
    return f" [{low}, {high}]"


class EvaluationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was evaluated, and on what."""

    source: str  # the checkpoint or the file of detections
    step: int | None = None
    epoch: float | None = None
    data: str  # the dataset folder
    store: str
    split: str
    images: int = 0
    detections: int = 0
    precision: str | None = None  # None: a file of detections, an older record, or several
    score_threshold: float | None = None  # lowest of the detections; None as above
    warnings: list[str] = []  # on the data, such as images that were trained on, too


class ErrorKind(msgspec.Struct, frozen=True):
    """One of TIDE's kinds of error."""

    kind: str
    meaning: str
    count: int
    delta_ap: float  # what AP50 would gain without these errors


class ClassAnalysis(msgspec.Struct, frozen=True):
    """One class. An undefined metric is -1."""

    category_id: int
    name: str
    objects: int
    AP: float
    AP50: float
    APs: float
    APm: float
    APl: float
    best_f1: float  # at IoU 0.5, over all score thresholds
    best_score: float  # the threshold that gives it
    precision: list[float]  # at IoU 0.5, for the recalls 0, 0.01 ... 1; empty without objects
    f1: list[float] = []  # at IoU 0.5, for the score thresholds 0, 0.01 ... 1; empty: see precision
    intervals: dict[str, Interval] = {}  # of AP, AP50, APs ...


class CalibrationBin(msgspec.Struct, frozen=True):
    """Detections of similar scores; if calibrated, their precision equals their mean score."""

    low: float
    high: float
    count: int
    mean_score: float
    fraction_right: float


class Confusion(msgspec.Struct, frozen=True):
    """Objects of one class that were detected as another."""

    truth: str
    found: str
    count: int


class SampleBox(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object of a sample image, or a detection."""

    category_id: int
    box: Box
    score: float | None = None  # None: an annotated object
    is_crowd: bool = False  # a region of many objects; detections in it do not count


class SampleImage(msgspec.Struct, frozen=True):
    """One image: its ground truth, and its detections with at least the sample score."""

    image_id: int
    file_name: str
    truth: list[SampleBox]
    found: list[SampleBox]
    is_worst: bool = False  # chosen for its errors, else at random
    content: str = ""  # a hash of the image file; empty: unknown


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A label that looks wrong, or a box that seems to be missing."""

    kind: str  # `class`, `not found` or `no box`
    suspicion: float  # 0 to 1
    image_id: int
    file_name: str
    box: Box
    label: str  # empty: there is no box
    detected: str  # the class of the detections; empty: there are none
    score: float  # of the detections


class Evaluation(msgspec.Struct, frozen=True):
    """One evaluation: the metrics and the data that they are computed from."""

    about: EvaluationInfo
    metrics: dict[str, float]
    per_class: list[ClassAnalysis]
    curves: dict[str, list[float]]  # IoU -> mean precision for the recalls 0, 0.01 ... 1
    errors: list[ErrorKind]
    calibration: list[CalibrationBin]
    calibration_error: float | None  # expected: the mean gap, by count; None: scores beyond 0 to 1
    confusions: list[Confusion]  # the most frequent ones
    samples: list[SampleImage]
    sample_score: float = SHOWN_SCORE  # lowest score in the samples; that of older files
    confusion: list[list[int]] = []  # ground truth x detected, background last; empty: too large
    intervals: dict[str, Interval] = {}  # of the metrics AP, AP50, AP75, APs, APm, APl
    suspects: list[Suspect] = []  # the worst first

    def __repr__(self) -> str:
        """Return the metrics in one line: the curves and samples would fill pages."""
        metrics = ", ".join(f"{name}={value:.3f}" for name, value in self.metrics.items())
        return f"Evaluation({self.about.source}: {metrics}, images={self.about.images})"

    def _repr_html_(self) -> str:
        rows = [
            (c.name, c.objects, *(f"{v:.3f}" for v in (c.AP, c.AP50, c.best_f1)))
            for c in self.per_class
        ]
        return html_table(("class", "objects", "AP", "AP50", "best F1"), rows, repr(self))

    def thresholds(self, classes: Sequence[ClassName]) -> list[float | None]:
        """Return the score of the best F1 of each class; None if nothing of it was found."""
        scores = {c.name: c.best_score for c in self.per_class if c.best_f1 > 0}
        return [scores.get(name) for name in class_texts(classes)]

    def as_json(self) -> dict[str, Any]:
        """Return what `evaluate --json` prints: the documented keys first, then the details."""
        names = ("step", "epoch", "precision", "score_threshold")
        position = {name: getattr(self.about, name) for name in names}
        classes = msgspec.to_builtins(self.per_class)
        return {
            **{k: v for k, v in position.items() if v is not None},
            **self.metrics,
            "intervals": msgspec.to_builtins(self.intervals),
            "images": self.about.images,
            "detections": self.about.detections,
            "per_class": [{k: v for k, v in c.items() if k not in CURVES} for c in classes],
            "errors": msgspec.to_builtins(self.errors),
            "confusions": msgspec.to_builtins(self.confusions),
            "calibration_error": self.calibration_error,
        }


class Difference(msgspec.Struct, frozen=True):
    """A difference of two metrics and its 95% interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


class Comparison(msgspec.Struct, frozen=True):
    """Two evaluations A and B on the same images; differences are B - A."""

    a: Evaluation
    b: Evaluation
    difference: dict[str, Difference]  # of the metrics AP, AP50 ...
    per_class: list[dict[str, Difference]]  # in the order of `a.per_class`
    images_needed: int | None = None  # to show a difference that is not shown; None: too many

    @property
    def better(self) -> str | None:
        """`a` or `b` if the interval of the difference of AP excludes 0, else None."""
        ap = self.difference.get("AP")
        if ap is None or ap.low <= 0 <= ap.high:
            return None
        return "b" if ap.estimate > 0 else "a"

    def verdict(self) -> str:
        """Return one sentence: which one is better, or how many images would show it."""
        if self.better is not None:
            return f"{self.better.upper()} is better: AP {self.difference['AP']}"
        sentence = f"no difference can be shown with {counted(self.a.about.images, 'image')}"
        ap = self.difference.get("AP")
        if ap is None or ap.low == ap.high:
            return sentence
        needed = f"about {self.images_needed:,}" if self.images_needed else "more than 1,000,000"
        return f"{sentence}; {needed} would be needed"

    def as_json(self) -> dict[str, Any]:
        """Return what `evaluate --against --json` prints."""
        classes = zip(self.a.per_class, self.per_class, strict=True)
        return {
            "verdict": self.verdict(),
            "better": self.better,
            "images_needed": None if self.better else self.images_needed,
            "difference": msgspec.to_builtins(self.difference),
            "per_class": [
                {"category_id": c.category_id, "name": c.name, **msgspec.to_builtins(found)}
                for c, found in classes
            ],
            "a": {"source": self.a.about.source, **self.a.as_json()},
            "b": {"source": self.b.about.source, **self.b.as_json()},
        }


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    write_bytes(path, msgspec.json.encode(evaluation) + b"\n")


def read_evaluation(path: Path) -> Evaluation | None:
    """Return the evaluation in a file, None without one; DataError if it is something else."""
    try:
        return msgspec.json.decode(read_limited(path, MAX_BYTES), type=msgspec_type(Evaluation))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path, error) from None
    except DECODE_ERRORS as error:
        raise DataError(
            f"{path}: not an evaluation that this version reads: {reason_of(error)}".replace(
                "`", ""
            ),
            hint="remove it; ssdctl evaluate CKPT --report DIR writes another one",
        ) from None
