"""`ssdctl doctor`."""

from __future__ import annotations

from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app


@command(
    app,
    "doctor",
    panel="This machine",
    settings=["data.*"],
    examples=["ssdctl doctor", "ssdctl doctor --data /data/coco --json"],
)
def doctor(call: Call) -> None:
    """Say what this machine has and lacks, each with its remedy."""
    from ssdctl.doctor import Check, examine

    checks = examine(call.config)

    def line(check: Check) -> str:
        remedy = f"  -> {check.remedy}" if check.remedy else ""
        return f"{check.state:<5}{check.name:<13}{check.detail}{remedy}"

    call.console.result([c._asdict() for c in checks], "\n".join(map(line, checks)))
