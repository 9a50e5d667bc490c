"""The charts of the report: training curves, PR, F1, calibration.

`page.html` draws them as inline SVG. Its script shows the values under the pointer: `as_json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.drawing import class_color, one_line
from ssdctl.evaluation.analysis import best_threshold
from ssdctl.runs.evaluation import Evaluation
from ssdctl.runs.metrics import Record
from ssdctl.runs.run import Run

WIDTH, HEIGHT = 420, 240  # pixels of the drawing, which the page scales
LEFT, TOP, RIGHT, BOTTOM = 46, 10, 408, 204  # edges of the plot in it
NUM_COLORS = 6  # --c1 ... --c6 of the page's style
DASHES = ("", "6 4", "2 3", "8 3 2 3")
MOST_POINTS, LEAST_POINTS = 600, 100  # all lines, a run's line; more are averaged
MOST_CLASSES = 100  # that have a line each
MOST_COLORED = 7  # classes whose lines have their colors and stand in the legend
Values = NDArray[np.float64]


class Line(NamedTuple):
    """One line of a chart."""

    name: str
    x: Values
    y: Values
    color: str  # in CSS
    dash: str = ""
    is_faint: bool = False  # shown clearly only if its class is selected
    number: int = -1  # class index

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "color": self.color,
            "faint": self.is_faint,
            "number": self.number,
            "x": [_short(v) for v in self.x.tolist()],
            "y": [_short(v) for v in self.y.tolist()],
        }


class Metric(NamedTuple):
    """A metric of a training chart."""

    key: str
    name: str
    is_eval: bool = False
    color: int = 0
    dash: int = 0


TRAINING = [
    ("Loss", [Metric("loss", "training"), Metric("loss", "validation", True, 1)]),
    (
        "AP of the evaluations",
        [Metric(name, name, True, color) for color, name in enumerate(("AP", "AP50", "AP75"))],
    ),
    (
        "Box and class loss",
        [
            Metric("loss_box", "box, training"),
            Metric("loss_box", "box, validation", True, 0, 1),
            Metric("loss_class", "class, training", False, 1),
            Metric("loss_class", "class, validation", True, 1, 1),
        ],
    ),
    ("Learning rate", [Metric("lr", "learning rate")]),
    ("Images per second", [Metric("images_per_second", "images per second")]),
    ("Gradient norm", [Metric("grad_norm", "gradient norm")]),
]


class Scale(NamedTuple):
    """Maps data to pixels of the drawing."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: Any) -> Any:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (RIGHT - LEFT)

    def y(self, value: Any) -> Any:
        return BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (BOTTOM - TOP)

    def points(self, line: Line) -> list[tuple[str, str]]:
        pixels = np.stack([self.x(line.x), self.y(line.y)], axis=1)
        return [(f"{x:.1f}", f"{y:.1f}") for x, y in pixels.tolist()]


UNIT = Scale(0, 1, 0, 1)


class Chart(NamedTuple):
    """A chart with the texts of its axes."""

    title: str
    x_label: str
    lines: Sequence[Line]
    scale: Scale = UNIT
    y_label: str = ""
    bars: Sequence[tuple[float, float, float]] = ()  # low and high x, and y
    mark: tuple[float, str] | None = None  # a vertical line at x, with a text
    hover: Line | None = None  # whose values the script shows; None: those of all lines

    @property
    def legend(self) -> list[Line]:
        legend = [line for line in self.lines if not line.is_faint]
        return legend if len(legend) > 1 else []

    @property
    def ticks(self) -> tuple[list[float], list[float]]:
        """The values at ticks of the x and y axes."""
        x0, x1, y0, y1 = self.scale
        return _ticks(x0, x1, 6), _ticks(y0, y1, 5)

    def as_json(self) -> dict[str, Any]:
        """Return what the page's script needs to show the values."""
        lines = [self.hover] if self.hover else self.lines
        return {
            "x": self.x_label,
            "area": [LEFT, TOP, RIGHT - LEFT, BOTTOM - TOP],
            "scale": list(self.scale),
            "lines": [line.as_json() for line in lines],
        }


def training_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the curves of training over the steps; those with fewer than two points are left out.

    Several runs have a color each, several metrics of a chart a line style each.
    """
    last = max([1, *(r["step"] for run in runs for r in (*run.train, *run.evals))])
    charts = []
    for title, metrics in TRAINING:
        lines = [
            Line(
                name=f"{one_line(run.name)}: {metric.name}" if len(runs) > 1 else metric.name,
                x=x,
                y=y,
                color=_color(number if len(runs) > 1 else metric.color),
                dash=DASHES[style if len(runs) > 1 else metric.dash],
            )
            for number, run in enumerate(runs)
            for style, metric in enumerate(metrics)
            for x, y in [_points(run.evals if metric.is_eval else run.train, metric.key, len(runs))]
            if len(x)
        ]
        if any(len(line.x) > 1 for line in lines):
            top = max(float(line.y.max()) for line in lines)
            charts.append(Chart(title, "step", lines, Scale(0, last, 0, top * 1.05 or 1)))
    return charts


def precision_recall(evaluation: Evaluation) -> Chart | None:
    """Return precision over recall: the mean of the classes for each IoU, and each class at 0.5."""
    means = [
        Line(f"mean, IoU {iou}", _shares(curve), np.array(curve), "currentColor", DASHES[n % 4])
        for n, (iou, curve) in enumerate(evaluation.curves.items())
        if len(curve) > 1
    ]
    classes = _class_lines(evaluation, [entry.precision for entry in evaluation.per_class])
    if not means:
        return None
    lines = [*classes, *means]
    return Chart("Precision and recall", "recall", lines, y_label="precision")


def f1_over_score(evaluation: Evaluation) -> Chart | None:
    """Return F1 over the score threshold: each class and the mean, with the best threshold."""
    curves = [entry.f1 for entry in evaluation.per_class]
    best = best_threshold(evaluation)
    if best is None:
        return None
    mean = np.mean([curve for curve in curves if curve], axis=0)
    lines = [*_class_lines(evaluation, curves), Line("mean", _shares(mean), mean, "currentColor")]
    mark = (best[0], f"best: {best[0]:.2f}")
    return Chart("F1 and score threshold", "score threshold", lines, y_label="F1", mark=mark)


def calibration(evaluation: Evaluation) -> Chart | None:
    """Return a reliability diagram: precision over score; None without detections."""
    bins = [b for b in evaluation.calibration if b.count]
    if not bins:
        return None
    ends = np.array([0.0, 1.0])
    ideal = Line("calibrated", ends, ends, "var(--muted)", DASHES[1])
    bars = [(b.low, b.high, b.fraction_right) for b in bins]
    middle = np.array([(b.low + b.high) / 2 for b in bins])
    right = Line("precision", middle, np.array([b.fraction_right for b in bins]), _color(0))
    return Chart("Calibration", "score", [ideal], UNIT, "precision", bars, hover=right)


def runs_precision_recall(runs: Sequence[Run]) -> Chart | None:
    """Return the mean precision over recall at IoU 0.5 of several runs."""
    lines = [
        Line(one_line(run.name), _shares(curve), np.array(curve), _color(number))
        for number, run in enumerate(runs)
        if run.evaluation and len(curve := run.evaluation.curves.get("0.50", [])) > 1
    ]
    if not lines:
        return None
    return Chart("Precision and recall at IoU 0.5", "recall", lines, y_label="precision")


def _class_lines(evaluation: Evaluation, curves: Sequence[list[float]]) -> list[Line]:
    if len(curves) > MOST_CLASSES:
        return []
    is_colored = len(curves) <= MOST_COLORED
    return [
        Line(
            one_line(entry.name),
            _shares(curve),
            np.array(curve),
            class_color(number + 1) if is_colored else "var(--muted)",
            is_faint=not is_colored,
            number=number,
        )
        for number, (entry, curve) in enumerate(zip(evaluation.per_class, curves, strict=True))
        if len(curve) > 1
    ]


def _color(number: int) -> str:
    return f"var(--c{number % NUM_COLORS + 1})"


def _shares(curve: Sequence[float] | Values) -> Values:
    return np.linspace(0, 1, len(curve))


def _points(records: Sequence[Record], key: str, num_runs: int) -> tuple[Values, Values]:
    """Return steps and values, averaged if they are many, without values that do not exist (-1)."""
    pairs = [(r["step"], float(r[key])) for r in records if key in r]
    points = np.array([p for p in pairs if p[1] >= 0], np.float64).reshape(-1, 2)
    if len(points) > (limit := max(MOST_POINTS // num_runs, LEAST_POINTS)):
        points = np.array([part.mean(axis=0) for part in np.array_split(points, limit)])
    return points[:, 0], points[:, 1]


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most `most` + 1 round values between two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def tick(value: float) -> str:
    """Return the text of a tick."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.6g}k"
    return f"{value:.4g}"


def _short(value: float) -> float:
    """Return 7 significant digits of a value: a page has thousands of them."""
    short = float(f"{value:.7g}")
    return int(short) if short.is_integer() else short
