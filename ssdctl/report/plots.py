"""Draw charts as inline SVG: training curves, precision and recall, calibration."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.inference.drawing import PALETTE, one_line
from ssdctl.runs.evaluation import Evaluation
from ssdctl.runs.metrics import is_number
from ssdctl.runs.reader import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's yellow is too pale for a line on white.
LINE_COLOURS = [colour for colour in PALETTE[:7] if colour != "#F0E442"]
LINE_STYLES = ("-", "--", ":", "-.")
SIZE = (4.6, 2.9)  # inches: small, so that the text is readable on a phone
# Of the axes, in fractions of a chart. To compute them from the labels, as matplotlib's layout
# engines do, takes more time than to draw the chart.
MARGINS = {"left": 0.145, "right": 0.975, "top": 0.91, "bottom": 0.155}
SVG_DPI = 72  # of matplotlib's SVG: a pixel of the chart is a unit of the page
MOST_POINTS, LEAST_POINTS = 600, 100  # of the lines of all runs, of one; more are averaged


class Chart(NamedTuple):
    """A chart, and what the page's script needs to show values under the pointer."""

    svg: str
    hover: str = ""  # JSON: name of x, labels of the lines, data coordinates from pixels


@contextlib.contextmanager
def _style() -> Iterator[None]:
    """Set matplotlib up for charts with names from users' files.

    A `$` in a name is not mathematics, a letter that the font lacks is not worth a warning, and
    the same run gives the same SVG.
    """
    import matplotlib as mpl

    with (
        mpl.rc_context({"text.parse_math": False, "svg.hashsalt": "ssdctl"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*missing from (current )?font")
        yield


@_style()
def curve(
    runs: Sequence[RunData],
    kind: str,
    keys: Sequence[str],
    title: str,
    over: str = "step",
) -> Chart | None:
    """Plot figures over steps or epochs, a line per run and figure; None without points.

    Args:
        runs: Each has its colour; each key has its line style.
        kind: `train` or `eval`.
        keys: Figures of the records.
        title: The quantity, with its unit.
        over: `step` or `epoch`.
    """
    figure, axes = _chart(title, over)
    is_empty = True
    for number, run in enumerate(runs):
        records = run.train if kind == "train" else run.evals
        for style, key in zip(LINE_STYLES, keys, strict=False):
            x, y = _points(
                [(float(r[over]), float(r[key])) for r in records if is_number(r.get(key))],
                limit=max(MOST_POINTS // len(runs), LEAST_POINTS),
            )
            if not len(x):
                continue
            is_empty = False
            label = _label(run.name if len(runs) > 1 else "", key)
            colour = LINE_COLOURS[(number if len(runs) > 1 else keys.index(key)) % 6]
            marker = "o" if len(x) < 20 else None
            axes.plot(x, y, style, color=colour, label=label, marker=marker, markersize=3)
    if is_empty:
        return None
    axes.set_ylim(bottom=0)
    if len(runs) * len(keys) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _chart_with_hover(figure, axes, over)


@_style()
def precision_recall(runs: Sequence[RunData]) -> Chart | None:
    """Plot the mean precision over recall, a line per IoU; None if no run was evaluated."""
    figure, axes = _chart("precision over recall, mean of the classes", "recall")
    is_empty = True
    evaluated = [run for run in runs if run.evaluation]
    for number, run in enumerate(evaluated):
        assert run.evaluation is not None
        for which, (iou, precision) in enumerate(run.evaluation.curves.items()):
            if not precision:
                continue
            is_empty = False
            label = _label(run.name if len(evaluated) > 1 else "", f"IoU {iou}")
            colour = LINE_COLOURS[(number if len(evaluated) > 1 else which) % 6]
            recall = np.linspace(0, 1, len(precision))
            axes.plot(recall, precision, LINE_STYLES[which % 4], color=colour, label=label)
    if is_empty:
        return None
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, 1)
    axes.legend(fontsize=8, frameon=False)
    return _chart_with_hover(figure, axes, "recall")


@_style()
def calibration(evaluation: Evaluation) -> Chart | None:
    """Plot a reliability diagram: precision over score; None without detections."""
    bins = [b for b in evaluation.calibration if b.count]
    if not bins:
        return None
    figure, axes = _chart("precision", "score")
    axes.bar(
        [(b.low + b.high) / 2 for b in bins],
        [b.fraction_right for b in bins],
        width=0.09,
        color=LINE_COLOURS[1],
        label="detections",
    )
    axes.plot([0, 1], [0, 1], "--", color="#808890", linewidth=1, label="calibrated")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, frameon=False)
    return Chart(_svg(figure))


def sparkline(precision: Sequence[float]) -> str:
    """Return a class's precision over recall as a small SVG, both axes from 0 to 1."""
    if len(precision) < 2:
        return ""
    steps = range(0, len(precision), 4)
    points = " ".join(f"{100 * i / (len(precision) - 1):.0f},{30 - 28 * precision[i]:.1f}"
                      for i in steps)  # fmt: skip
    return (
        '<svg class="spark" viewBox="0 0 100 31" preserveAspectRatio="none" role="img" '
        'aria-label="precision over recall">'
        f'<polygon points="0,30 {points} 100,30" fill="{PALETTE[1]}" fill-opacity=".25"/>'
        f'<polyline points="{points}" fill="none" stroke="{PALETTE[4]}" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )


def _chart(title: str, x: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, dpi=SVG_DPI)
    figure.subplots_adjust(**MARGINS)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.yaxis.set_major_formatter("{x:.4g}")  # at most seven characters, which fit the margin
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _label(run: str, text: str) -> str:
    """Return a legend entry. matplotlib leaves out those that begin with an underscore."""
    return f"{one_line(run).lstrip('_') or 'run'} {text}" if run else text


def _chart_with_hover(figure: Figure, axes: Axes, x: str) -> Chart:
    """Return the chart; its lines are the groups curve-0, curve-1 ... of the SVG."""
    for number, line in enumerate(axes.lines):
        line.set_gid(f"curve-{number}")
    svg = _svg(figure)
    (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (1, 1)])
    height = SIZE[1] * SVG_DPI
    box = axes.get_window_extent()
    hover = {
        "x": x,
        "labels": [str(line.get_label()) for line in axes.lines],
        "colours": [str(line.get_color()) for line in axes.lines],
        "scale": [float(v) for v in (x0, x1 - x0, height - y0, y0 - y1)],
        "area": [float(v) for v in (box.x0, height - box.y1, box.width, box.height)],
    }
    return Chart(svg, json.dumps(hover))


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    # Black text and axes follow the page's colours, which may be dark.
    return svg[svg.index("<svg") :].replace("#000000", "currentColor")


def _points(
    pairs: Sequence[tuple[float, float]], limit: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x and y, averaged if they are many, without figures that do not exist (-1)."""
    points = np.array([p for p in pairs if p[1] >= 0]).reshape(-1, 2)
    if len(points) > limit:
        points = np.array([part.mean(axis=0) for part in np.array_split(points, limit)])
    return points[:, 0], points[:, 1]
