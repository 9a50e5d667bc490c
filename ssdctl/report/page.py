"""The report: one HTML page that needs nothing else, from one run folder or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ssdctl import __version__
from ssdctl.evaluate.coco_ap import FIGURES
from ssdctl.files import write_text
from ssdctl.report.plots import curve
from ssdctl.report.rundata import RunData
from ssdctl.report.samples import sample_detections


def write_report(runs: Sequence[RunData], target: Path) -> None:
    """Write the page of some runs.

    Raises:
        DiskError: It cannot be written.
    """
    charts = [
        curve(runs, "train", ["loss", "loss_box", "loss_class"], "loss"),
        curve(runs, "eval", ["AP", "AP50", "AP75"], "AP on the validation split"),
        curve(runs, "train", ["lr"], "learning rate"),
        curve(runs, "train", ["images_per_second"], "images per second"),
        curve(runs, "train", ["grad_norm"], "gradient norm"),
    ]
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters["figure"] = lambda v: "-" if v is None or v < 0 else f"{v:.3f}"
    page = environment.get_template("page.html").render(
        runs=runs,
        charts=[Markup(chart) for chart in charts if chart],  # matplotlib's own SVG
        figures=list(FIGURES),
        class_names=sorted({name for run in runs for name in run.class_ap}),
        samples=[sample_detections(run) for run in runs],
        version=__version__,
    )
    write_text(target, page)
