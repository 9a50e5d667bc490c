"""`ssdctl runs` and `ssdctl report`, and the run that commands use if none is named."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.console import Console, table
from ssdctl.runs.layout import RUNS, RunDir

if TYPE_CHECKING:
    from rich.console import Group

    from ssdctl.runs.reader import RunSummary


@command("runs", panel="Results", examples=["ssdctl runs", "ssdctl runs experiments --json"])
def runs(
    call: Call, folder: Annotated[str, Argument(metavar="DIR", help="Folder of runs")] = str(RUNS)
) -> None:
    """List runs, the newest first: date, data, network, steps and best AP.

    Runs in progress and runs with broken files are listed, too.
    """
    from ssdctl.runs.reader import summarize_runs

    found = summarize_runs(Path(folder))
    call.console.result(
        [{**run._asdict(), "path": str(run.path), "date": _date(run)} for run in found],
        (lambda: _table(found)) if found else f"{folder}: no runs",
    )
    if found:
        call.console.closing([], [f"ssdctl report {found[0].path}"])


def newest_run(console: Console, *, has_checkpoint: bool = True) -> str:
    """Return the newest run of `runs/`, and name it in a line."""
    from ssdctl.runs import reader

    path = reader.newest_run(has_checkpoint=has_checkpoint)
    console.info(f"using the newest run: {path}")
    return str(path)


@command(
    "report",
    panel="Results",
    examples=["ssdctl report runs/coco-resnet34", "ssdctl report runs/a runs/b --out both.html"],
)
def report(
    call: Call,
    runs: Annotated[
        list[str] | None, Argument(metavar="RUN...", help="Run folders [default: the newest run]")
    ] = None,
    out: Annotated[
        str | None, Option(metavar="FILE.html", help="File to write [default: RUN/report.html]")
    ] = None,
) -> None:
    """Write an HTML report of one or more runs."""
    from ssdctl.reporting.page import write_report
    from ssdctl.runs.reader import read_runs

    named = runs or [newest_run(call.console, has_checkpoint=False)]
    contents = read_runs([Path(run) for run in named])
    target = Path(out) if out else RunDir(Path(named[0])).report
    write_report(contents, target)
    call.console.result({"file": str(target)}, f"report: {target}")
    call.console.closing([], [f"ssdctl predict {named[0]} photo.jpg --out drawn"])


def _table(found: list[RunSummary]) -> Group:
    from rich.console import Group

    rows = table("run", "date", "data", "network", "steps", "AP", left=range(4))
    for column in rows.columns:
        if column.header in ("run", "data"):
            column.overflow = "fold"
        else:
            column.no_wrap = True
    for run in found:
        ap = "-" if run.ap is None or run.ap < 0 else f"{run.ap:.3f}"
        steps = f"{run.steps:,}"
        rows.add_row(str(run.path), _date(run), run.data, run.network, steps, ap)
    notes = [f"{run.path}: {run.state}" for run in found if run.state]
    return Group(rows, *notes)


def _date(run: RunSummary) -> str:
    return datetime.datetime.fromtimestamp(run.time).isoformat(" ", "minutes")
