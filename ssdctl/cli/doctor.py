"""`ssdctl doctor`."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from ssdctl.cli.app import app
from ssdctl.cli.command import Call, command
from ssdctl.cli.interrupts import stoppable
from ssdctl.errors import UsageError

WIDTH_ELSEWHERE, WIDEST = 100, 120  # where there is no terminal to ask: a file, an issue


@command(
    app,
    "doctor",
    panel="This machine",
    settings=["data.*", "download.mirror"],
    examples=[
        "ssdctl doctor",
        "ssdctl doctor --network --self-test",
        "ssdctl doctor --data /data/coco --json",
    ],
)
def doctor(
    call: Call,
    network: Annotated[
        bool, typer.Option("--network", help="Ask the download hosts too, through your proxies")
    ] = False,
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Also write 64 MB to the data's disk and read them, join two ranks, and train a "
            "step on the device that --device auto would choose",
        ),
    ] = False,
) -> None:
    """Say what this machine has and lacks, each with its remedy.

    Exits with 2 where something fails. Nothing is changed; --self-test writes a file without a
    name for some seconds. Passwords and your name are left out, so paste it into an issue.
    """
    from ssdctl.doctor.check import FAIL
    from ssdctl.doctor.render import to_text
    from ssdctl.doctor.run_checks import examine

    with stoppable("nothing was changed"):
        checks = examine(call.config, network=network, self_test=self_test, say=call.console.say)
    width = min(shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns, WIDEST)
    text = to_text(checks, width, call.console.painted)
    call.console.result([check._asdict() for check in checks], text, is_painted=True)
    if any(check.state == FAIL for check in checks):
        raise SystemExit(UsageError.exit_code)
