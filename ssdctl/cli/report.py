"""`ssdctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command


@command(
    app,
    "report",
    panel="Results",
    examples=["ssdctl report runs/coco-resnet34", "ssdctl report runs/a runs/b --out both.html"],
)
def report(
    call: Call,
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run folders", show_default=False)
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="File to write [default: RUN/report.html]",
        ),
    ] = None,
) -> None:
    """Write an HTML report of one or more runs."""
    from ssdctl.report.page import write_report
    from ssdctl.runs.layout import RunDir
    from ssdctl.runs.reader import read_runs

    contents = read_runs([Path(run) for run in runs])
    target = Path(out) if out else RunDir(Path(runs[0])).report
    write_report(contents, target)
    call.console.result({"file": str(target)}, f"report: {target}")
