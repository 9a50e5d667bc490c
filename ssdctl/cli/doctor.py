"""`ssdctl doctor`."""

from __future__ import annotations

import shlex
import shutil
import sys
from typing import Annotated

from typer import Option

from ssdctl.cli.command import Call, command, stoppable
from ssdctl.cli.console import is_encodable
from ssdctl.errors import UsageError

DEFAULT_WIDTH, MAX_WIDTH = 100, 120  # columns; the default is for output that is not a terminal


@command(
    "doctor",
    panel="This machine",
    settings="data.* download.mirror",
    examples=[
        "ssdctl doctor",
        "ssdctl doctor -v   # every check",
        "ssdctl doctor --network --self-test",
        "ssdctl doctor --data /data/coco --json",
        "ssdctl launch --gpus 8 -- doctor --collectives",
    ],
)
def doctor(
    call: Call,
    network: Annotated[
        bool, Option("--network", help="Also connect to the download hosts")
    ] = False,
    self_test: Annotated[
        bool, Option("--self-test", help="Also test the disk, two ranks and a step")
    ] = False,
    collectives: Annotated[
        bool, Option("--collectives", help="Only test all ranks of a launch")
    ] = False,
) -> None:
    """Check this machine and suggest fixes.

    Exits with 2 if a check fails. Nothing is changed; --self-test briefly writes a temporary file.
    Output contains no secrets; safe to paste into an issue.
    """
    from ssdctl.doctor.check import FAIL, Check
    from ssdctl.doctor.run_checks import ASCII_MARKS, MARKS, examine, problems, to_text

    checks: list[Check]
    with stoppable("nothing was changed"):
        if collectives:
            from ssdctl.doctor.probes import check_collectives

            checks = [c._replace(group="Collectives") for c in check_collectives(call.config)]
            if not checks:  # another rank, which prints nothing
                return
        else:
            checks = examine(call.config, network=network, self_test=self_test)
    width = min(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, MAX_WIDTH)
    paint = call.console.painted
    if call.console.quiet:
        text = problems(checks, width, paint)
    else:
        data = call.config.data.root
        options = f" --data {shlex.quote(data)}" if data else ""
        has_dataset = any(check.name == "store" for check in checks)
        text = to_text(
            checks,
            width,
            f"ssdctl train{options} --dry-run" if has_dataset else "ssdctl demo",
            paint,
            verbose=call.console.verbose,
            marks=MARKS if is_encodable("".join(MARKS.values()), sys.stdout) else ASCII_MARKS,
        )
    if text or call.console.as_json:
        call.console.result([check._asdict() for check in checks], text, is_painted=True)
    if any(check.state == FAIL for check in checks):
        raise SystemExit(UsageError.exit_code)
