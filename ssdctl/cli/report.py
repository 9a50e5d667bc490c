"""`ssdctl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.runs import newest_run


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
        str | None,
        Option("--out", metavar="FILE.html", help="File to write [default: RUN/report.html]"),
    ] = None,
) -> None:
    """Write an HTML report of one or more runs."""
    from ssdctl.reporting.page import write_report
    from ssdctl.runs.layout import RunDir
    from ssdctl.runs.reader import read_runs

    named = runs or [newest_run(call.console, has_checkpoint=False)]
    contents = read_runs([Path(run) for run in named])
    target = Path(out) if out else RunDir(Path(named[0])).report
    write_report(contents, target)
    call.console.result({"file": str(target)}, f"report: {target}")
    call.console.closing([], [f"ssdctl predict {named[0]} photo.jpg --out drawn"])
