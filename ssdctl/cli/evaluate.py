"""`ssdctl evaluate`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.distributed.ranks import MainRankFilter, Ranks, find_ranks
from ssdctl.errors import SsdctlError
from ssdctl.files import make_dir
from ssdctl.runtime.process_settings import tune_process

if TYPE_CHECKING:
    from rich.console import Group

    from ssdctl.runs.evaluation import Evaluation


@command(
    app,
    "evaluate",
    panel="Results",
    settings=["data.*", "evaluate.*"],
    examples=[
        "ssdctl evaluate runs/coco-resnet34/checkpoints/best.pt",
        "ssdctl evaluate ckpt.pt --data /data/coco --json",
        "ssdctl evaluate ckpt.pt --report evaluation   # a page with errors by type",
        "ssdctl evaluate runs/coco-resnet34   # every checkpoint of the run",
        "ssdctl evaluate detections.json --data /data/coco --verify",
        "ssdctl launch --gpus 8 -- evaluate ckpt.pt",
    ],
)
def evaluate(
    call: Call,
    what: Annotated[
        str,
        typer.Argument(
            metavar="CKPT|RUN|DETECTIONS.json",
            help="Checkpoint, ONNX file, run folder, detector, hf://org/name, or COCO results",
            show_default=False,
        ),
    ],
    detections: Annotated[
        str | None,
        typer.Option("--detections", metavar="FILE", help="Write the detections as COCO results"),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            "--report",
            metavar="DIR",
            help="Write an HTML report to DIR",
        ),
    ] = None,
) -> None:
    """Compute COCO AP for a checkpoint, a run, or a file of detections.

    Checkpoints remember their dataset, so you can omit --data. The result lists the classes, and
    how much AP50 each type of error costs.
    """
    from ssdctl.evaluate.sources import files_to_score, locate_source

    path = locate_source(what, mirror=call.config.download.mirror)
    if report is not None:
        make_dir(Path(report))  # before the detection, which may take hours
    evaluations = _evaluate(call, files_to_score(path), Path(detections) if detections else None)
    if not evaluations:  # not the main rank
        return
    if report is not None:
        from ssdctl.report.page import write_evaluation_report

        best = max(evaluations, key=lambda e: e.figures["AP"])
        page = write_evaluation_report(best, Path(report))
        call.console.info(f"report: {page}")
    if not call.console.as_json:
        return
    if path.is_dir():
        results = [{"checkpoint": e.about.source, **e.as_json()} for e in evaluations]
        call.console.result({"checkpoints": results})
    else:
        call.console.result(evaluations[0].as_json())


def _evaluate(call: Call, files: list[Path], detections: Path | None) -> list[Evaluation]:
    """Score all files and print each result; the list is empty on ranks other than the main one."""
    from ssdctl.evaluate.sources import evaluate_files

    tune_process()
    ranks = find_ranks()
    call.console.handler.addFilter(MainRankFilter(ranks))
    evaluations = []
    with _one_report(ranks):
        for evaluation in evaluate_files(
            files, call.resolved, progress=call.console.progress, detections_file=detections
        ):
            evaluations.append(evaluation)
            if not call.console.as_json:
                if len(files) > 1:  # the tables do not name the checkpoint
                    call.console.result(None, evaluation.about.source)
                call.console.result(None, functools.partial(tables, evaluation))
    return evaluations


@contextlib.contextmanager
def _one_report(ranks: Ranks) -> Iterator[None]:
    """Exit silently on the other ranks if the main rank reports the same error."""
    try:
        yield
    except SsdctlError as error:
        if error.is_from_all_ranks and not ranks.is_main:
            raise SystemExit(error.exit_code) from None
        raise


def tables(evaluation: Evaluation) -> Group:
    """Return tables of the 12 figures, the classes, and the errors by type."""
    from rich.console import Group
    from rich.table import Table

    from ssdctl.evaluate.analysis import ERROR_NAMES

    def table(*columns: str) -> Table:
        result = Table()
        for number, column in enumerate(columns):
            result.add_column(column, justify="right" if number else "left")
        return result

    figures = table("figure", "value")
    for name, value in evaluation.figures.items():
        figures.add_row(name, format_score(value))
    classes = table("class", "AP", "AP50", "small", "medium", "large", "objects")
    for entry in evaluation.per_class:
        values = (entry.AP, entry.AP50, entry.APs, entry.APm, entry.APl)
        classes.add_row(entry.name, *map(format_score, values), str(entry.objects))
    errors = table("error type", "count", "AP50 gain", "meaning")
    for error in evaluation.errors:
        gain = f"+{error.delta_ap:.3f}"
        name = ERROR_NAMES.get(error.kind, error.kind)
        errors.add_row(name, str(error.count), gain, error.meaning)
    return Group(figures, classes, errors)


def format_score(value: float) -> str:
    """Format a score; -1 means that the split has no objects of this kind."""
    return "-" if value < 0 else f"{value:.3f}"
