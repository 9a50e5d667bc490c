"""Talk to a batch engine by its client: sbatch and scontrol, or kubectl."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from ssdctl.errors import DistributedError, UsageError
from ssdctl.launch.base import LaunchPlan

Write = Callable[[str], object]
POLL_S = 2.0
UNREACHABLE_S = 120.0  # how long the engine may be unreachable
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(;[A-Za-z0-9._-]*)?")


def require_client(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not on PATH", hint=hint)


def submit_text(plan: LaunchPlan, list_command: str) -> str:
    """Give a script or manifest to the client; return the id that it prints.

    Raises:
        UsageError: The engine rejects it; its message is included.
        DistributedError: The engine accepts it, but does not print its id.
    """
    process = _run(plan.argv, plan.text)
    if process.returncode:
        raise UsageError(f"{plan.argv[0]} refused the job: {process.stderr.strip()}")
    job = process.stdout.strip().rpartition("\n")[2]  # kubectl: one line per object, the job last
    if not JOB_ID.fullmatch(job):
        raise DistributedError(
            f"{plan.argv[0]} printed {job[:200]!r} instead of the id of the job",
            hint=f"the job may run: `{list_command}` lists the jobs",
        )
    return job


def query(*argv: str) -> str:
    """Return the output of an engine's client; retry while a controller is unavailable.

    Raises:
        DistributedError: The engine no longer answers or no longer lists the job.
    """
    end = time.monotonic() + UNREACHABLE_S
    while True:
        process = _run(argv)
        if process.returncode == 0:
            return process.stdout
        if "Invalid job id" in process.stderr or "NotFound" in process.stderr:
            raise DistributedError(f"{argv[0]} no longer lists the job: {process.stderr.strip()}")
        if time.monotonic() > end:
            raise DistributedError(f"{argv[0]} does not answer: {process.stderr.strip()}")
        time.sleep(POLL_S)


def _run(argv: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    # Its output may have any bytes.
    return subprocess.run(argv, input=text, capture_output=True, encoding="utf-8", errors="replace")
