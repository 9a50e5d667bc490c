"""Curves as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Sequence

from ssdctl.report.predict import PALETTE
from ssdctl.report.rundata import RunData

# Okabe and Ito's yellow is too pale for a line on white.
LINE_COLOURS = [colour for colour in PALETTE if colour != "#F0E442"]
LINE_STYLES = ("-", "--", ":", "-.")


def curve(runs: Sequence[RunData], kind: str, keys: Sequence[str], title: str) -> str | None:
    """One chart of figures over epochs, all runs in it; None where no run has two of them.

    Args:
        runs: Each has a colour; each key a line style.
        kind: `train` or `eval`.
        keys: Figures of the records.
        title: What is drawn, with its unit.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    is_empty = True
    for number, run in enumerate(runs):
        records = run.train if kind == "train" else run.evals
        epochs = [r["epoch"] for r in records]
        for style, key in zip(LINE_STYLES, keys, strict=False):
            label = " ".join(filter(None, [run.name if len(runs) > 1 else "", key]))
            marker = "o" if len(records) < 20 else None
            axes.plot(
                epochs,
                [r[key] for r in records],
                style,
                color=LINE_COLOURS[(number if len(runs) > 1 else keys.index(key)) % 6],
                label=label,
                marker=marker,
                markersize=3,
            )
            is_empty = is_empty and len(records) < 2
    if is_empty:
        return None
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("epoch", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(runs) * len(keys) > 1:
        axes.legend(fontsize=8, frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    return svg[svg.index("<svg") :]
