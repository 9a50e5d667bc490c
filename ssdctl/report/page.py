"""Write the report: one self-contained HTML page of one run folder or several. Torch-free."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ssdctl._version import __version__
from ssdctl.evaluate.analysis import ERROR_NAMES
from ssdctl.evaluate.coco_ap import FIGURES
from ssdctl.files import make_dir, write_text
from ssdctl.inference.drawing import class_color, one_line
from ssdctl.report import plots
from ssdctl.report.samples import sample_pictures
from ssdctl.runs.evaluation import Evaluation, write_evaluation
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import is_number
from ssdctl.runs.reader import RunData, different_settings, prepare_findings, read_run

MAX_PICTURES, MIN_PICTURES = 24, 3  # of all runs, of one: the page stays small


def write_report(runs: Sequence[RunData], target: Path) -> None:
    """Write the page of one run or several.

    Raises:
        DiskError: It cannot be written.
    """
    charts = [
        plots.curve(runs, "train", ["loss", "loss_box", "loss_class"], "loss"),
        plots.curve(
            runs,
            "eval",
            ["loss", "loss_box", "loss_class"],
            "loss on the validation split (if it rises: overfitting)",
        ),
        plots.curve(runs, "eval", ["AP", "AP50", "AP75"], "AP on the validation split", "epoch"),
        plots.curve(runs, "train", ["lr"], "learning rate"),
        plots.curve(runs, "train", ["images_per_second"], "images per second"),
        plots.curve(runs, "train", ["grad_norm"], "gradient norm"),
        plots.precision_recall(runs),
    ]
    limit = max(MAX_PICTURES // len(runs), MIN_PICTURES)
    analyses = [_analysis(run, limit) for run in runs]
    script = (Path(__file__).parent / "report.js").read_text(encoding="utf-8")
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    environment.filters["rate"] = lambda v: f"{v:.1f}" if is_number(v) else "-"
    environment.filters["spark"] = lambda v: Markup(plots.sparkline(v))  # only digits
    page = environment.get_template("page.html").render(
        runs=runs,
        charts=[_safe(chart) for chart in charts if chart],
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        figures=list(FIGURES),
        bests={name: _best(runs, name) for name in FIGURES},
        class_names=sorted({name for run in runs for name in run.class_ap}),
        differences=different_settings(list(runs)),
        analyses=analyses,
        data=_as_script(analyses),
        error_names=ERROR_NAMES,
        version=__version__,
    )
    # File names that are not UTF-8 contain surrogates, which a page cannot.
    write_text(target, page.encode("utf-8", "backslashreplace").decode())


def write_evaluation_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write an evaluation and its report to a folder, and return the page's path.

    Raises:
        DiskError: It cannot be written.
    """
    run = RunDir(make_dir(folder))
    write_evaluation(run.evaluation, evaluation)
    write_report([read_run(folder)], run.report)
    return run.report


def _safe(chart: plots.Chart) -> plots.Chart:
    """Mark matplotlib's own SVG as safe; it escapes the names in it."""
    return chart._replace(svg=Markup(chart.svg))


def _analysis(run: RunData, limit: int) -> dict[str, Any]:
    """Return what the page shows of a run's evaluation."""
    pictures, reason = sample_pictures(run.evaluation, limit)
    evaluation = run.evaluation
    chart = plots.calibration(evaluation) if evaluation else None
    return {
        "name": run.name,
        "evaluation": evaluation,
        "pictures": pictures,
        "reason": reason,
        "calibration": _safe(chart) if chart else None,
        "largest_error": _largest_error(evaluation),
        "findings": prepare_findings(Path(evaluation.about.store)) if evaluation else [],
    }


def _as_script(analyses: Sequence[dict[str, Any]]) -> Markup:
    """Return what the page's script reads, as JSON that cannot end its script element."""
    data = []
    for analysis in analyses:
        evaluation: Evaluation | None = analysis["evaluation"]
        classes = [one_line(c.name) for c in evaluation.per_class] if evaluation else []
        data.append(
            {
                "classes": classes,
                "colours": [class_color(n + 1) for n in range(len(classes))],
                "confusion": evaluation.confusion if evaluation else [],
                "pictures": [
                    {"truth": p.truth, "detections": p.detections} for p in analysis["pictures"]
                ],
            }
        )
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _largest_error(evaluation: Evaluation | None) -> float:
    return max((e.delta_ap for e in evaluation.errors), default=0) if evaluation else 0


def _figure(value: float | None) -> str:
    return "-" if value is None or value < 0 else f"{value:.3f}"


def _best(runs: Sequence[RunData], name: str) -> float | None:
    """Return the best value of a figure if several runs have one."""
    values = [run.best[name] for run in runs if run.best and name in run.best]
    return max(values) if len(values) > 1 else None
