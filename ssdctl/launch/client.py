"""Run the client of a batch engine: sbatch, scontrol, kubectl."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from ssdctl.errors import DistributedError, UsageError
from ssdctl.launch.job import Job

POLL_S = 2.0
UNREACHABLE_S = 120.0  # how long a batch engine may be unreachable
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(;[A-Za-z0-9._-]*)?")


def submit_text(job: Job, list_command: str) -> str:
    """Give a script or manifest to the client; return the id that it prints.

    Raises:
        UsageError: The engine rejects it; its message is included.
        DistributedError: The engine accepts it, but does not print its id.
    """
    process = _call(job.argv, job.text)
    if process.returncode:
        raise UsageError(f"{job.argv[0]} refused the job: {process.stderr.strip()}")
    job_id = process.stdout.strip().rpartition("\n")[2]  # kubectl: one line per object, it is last
    if not JOB_ID.fullmatch(job_id):
        raise DistributedError(
            f"{job.argv[0]} printed {job_id[:200]!r} instead of the id of the job",
            hint=f"the job may run: `{list_command}` lists the jobs",
        )
    return job_id


def query(*argv: str) -> str:
    """Return the output of an engine's client; retry while a controller is unavailable.

    Raises:
        DistributedError: The engine no longer answers or no longer lists the job.
    """
    end = time.monotonic() + UNREACHABLE_S
    while True:
        process = _call(argv)
        if process.returncode == 0:
            return process.stdout
        if "Invalid job id" in process.stderr or "NotFound" in process.stderr:
            raise DistributedError(f"{argv[0]} no longer lists the job: {process.stderr.strip()}")
        if time.monotonic() > end:
            raise DistributedError(f"{argv[0]} does not answer: {process.stderr.strip()}")
        time.sleep(POLL_S)


def _call(argv: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    # Its output may have any bytes.
    return subprocess.run(argv, input=text, capture_output=True, encoding="utf-8", errors="replace")
