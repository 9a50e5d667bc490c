"""Run ranks, wait for conditions, and check whether a process is running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forked import ForkedProcess

from ssdctl.launch.run import free_port


def wait_for(condition: Callable[[], Any], timeout_s: float = 90) -> Any:
    """Return the condition's value as soon as it is true."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {timeout_s} s")


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Ended(NamedTuple):
    """Exit code, output and error text of a process."""

    code: int
    out: str
    err: str


def run_script(script: str, *arguments: object, **variables: str) -> ForkedProcess:
    """Start a script in a fork; `sys.argv[1:]` are the arguments."""

    def run() -> None:
        sys.argv = ["script", *map(str, arguments)]
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})

    return ForkedProcess(run, **variables)


def start_script(script: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start a script in a new interpreter: it may score detections, which a fork must not."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(
    count: int,
    script: str,
    *arguments: object,
    start: Callable[..., ForkedProcess | subprocess.Popen[str]] = run_script,
    **variables: str,
) -> list[Ended]:
    """Run a script in processes that form a group."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common["WORLD_SIZE"] = str(count)
    ranks = [
        start(script, *arguments, **{**common, **variables, "RANK": r, "LOCAL_RANK": r})
        for r in map(str, range(count))
    ]
    try:
        outputs = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Ended(rank.wait(1), *o) for rank, o in zip(ranks, outputs, strict=True)]
