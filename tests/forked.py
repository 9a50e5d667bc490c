"""Run commands at the same moment in forks of the test process, which has imported everything."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

START_S = 0.02  # all forks are waiting by then


def run_together(works: list[Callable[[], int]], log: Path) -> list[int]:
    """Call each function in a fork of its own, all at the same time; return what they return.

    Args:
        works: The result of each is its process's exit code.
        log: The folder of their output, one file each.
    """
    log.mkdir(parents=True, exist_ok=True)
    start = time.monotonic() + START_S
    children = []
    for number, work in enumerate(works):
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that do not matter
            pid = os.fork()
        if pid == 0:
            os._exit(_child(work, start, log / f"{number}.log"))
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def import_modules_of(work: Callable[[], int], log: Path) -> int:
    """Run a function in a fork, then import here what it imported; return what it returned.

    Forks that run the same again import nothing, so that they stay close in time. The function
    itself is not run here: its threads would not exist in the forks.
    """
    names = log / "modules"

    def run() -> int:
        code = work()
        names.write_text("\n".join(sys.modules))
        return code

    (code,) = run_together([run], log)
    for name in names.read_text().splitlines():
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module(name)
    return code


def _child(work: Callable[[], int], start: float, log: Path) -> int:
    """Wait for the common start and work; never raise, since the fork must not continue a test."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        while time.monotonic() < start:
            pass
        return work()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        return 99
