"""Charts as inline SVG: curves of training, precision and recall, calibration."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ssdctl.inference.drawing import PALETTE
from ssdctl.runs.evaluation import Evaluation
from ssdctl.runs.reader import RunData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's yellow is too pale for a line on white.
LINE_COLOURS = [colour for colour in PALETTE if colour != "#F0E442"]
LINE_STYLES = ("-", "--", ":", "-.")
SIZE = (4.6, 2.9)  # inches: small, so that the letters stay readable on a phone
MOST_POINTS = 600  # of a line; more are averaged, for the page's sake


def curve(
    runs: Sequence[RunData],
    kind: str,
    keys: Sequence[str],
    title: str,
    over: str = "step",
) -> str | None:
    """One chart of figures over steps or epochs, all runs in it; None where there is no point.

    Args:
        runs: Each has a colour; each key a line style.
        kind: `train` or `eval`.
        keys: Figures of the records.
        title: What is drawn, with its unit.
        over: `step` or `epoch`.
    """
    figure, axes = _chart(title, over)
    is_empty = True
    for number, run in enumerate(runs):
        records = run.train if kind == "train" else run.evals
        for style, key in zip(LINE_STYLES, keys, strict=False):
            x, y = _points([(float(r[over]), float(r[key])) for r in records if key in r])
            if not len(x):
                continue
            is_empty = False
            label = " ".join(filter(None, [run.name if len(runs) > 1 else "", key]))
            colour = LINE_COLOURS[(number if len(runs) > 1 else keys.index(key)) % 6]
            marker = "o" if len(x) < 20 else None
            axes.plot(x, y, style, color=colour, label=label, marker=marker, markersize=3)
    if is_empty:
        return None
    axes.set_ylim(bottom=0)
    if len(runs) * len(keys) > 1:
        axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def precision_recall(runs: Sequence[RunData]) -> str | None:
    """Mean precision over recall, one line for an IoU; None where no run was analysed."""
    figure, axes = _chart("precision over recall, mean of the classes", "recall")
    is_empty = True
    known = [run for run in runs if run.evaluation]
    for number, run in enumerate(known):
        assert run.evaluation is not None
        for which, (iou, precision) in enumerate(run.evaluation.curves.items()):
            if not precision:
                continue
            is_empty = False
            label = " ".join(filter(None, [run.name if len(known) > 1 else "", f"IoU {iou}"]))
            colour = LINE_COLOURS[(number if len(known) > 1 else which) % 6]
            recall = np.linspace(0, 1, len(precision))
            axes.plot(recall, precision, LINE_STYLES[which % 4], color=colour, label=label)
    if is_empty:
        return None
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0, 1)
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def calibration(evaluation: Evaluation) -> str | None:
    """How often detections are right over the score that they have; None without detections."""
    bins = [b for b in evaluation.calibration if b.count]
    if not bins:
        return None
    figure, axes = _chart("share of detections that are right", "score")
    axes.bar(
        [(b.low + b.high) / 2 for b in bins],
        [b.fraction_right for b in bins],
        width=0.09,
        color=LINE_COLOURS[1],
        label="found",
    )
    axes.plot([0, 1], [0, 1], "--", color="#57606a", linewidth=1, label="calibrated")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8, frameon=False)
    return _svg(figure)


def sparkline(precision: Sequence[float]) -> str:
    """A class's precision over recall as a tiny SVG, both axes from 0 to 1."""
    if not precision:
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

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _svg(figure: Figure) -> str:
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "ssdctl"}):  # the same page from the same run
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]


def _points(
    pairs: Sequence[tuple[float, float]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x and y, averaged where they are many; a figure that does not exist (-1) is left out."""
    points = np.array([p for p in pairs if p[1] >= 0]).reshape(-1, 2)
    if len(points) > MOST_POINTS:
        points = np.array([part.mean(axis=0) for part in np.array_split(points, MOST_POINTS)])
    return points[:, 0], points[:, 1]
