"""Run two ranks, wait for conditions, and check whether a process is running."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


def run_two_ranks(script: str, *arguments: object, **variables: str) -> list[Ended]:
    """Run a script in two processes that form a group."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, **common, "RANK": r, "LOCAL_RANK": r, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in ("0", "1")
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    return [Ended(p.returncode, *o) for p, o in zip(processes, outputs, strict=True)]
