"""Run commands in forks of the test process, which has imported torch: that takes most of the
time of a short command. Torch allows it if there is no accelerator."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

START_S = 0.02  # all forks are waiting by then


class ForkedProcess:
    """A fork of this process that calls a function; used as `subprocess.Popen`.

    It must not score detections itself (training does it in another process): hotcoco's threads,
    which this process may have started, do not exist in a fork.

    Args:
        work: Called in the fork. The exit code is that of its SystemExit, 1 for another
            exception, else 0.
        variables: Added to the environment.
    """

    def __init__(self, work: Callable[[], object], **variables: str) -> None:
        importlib.import_module("ssdctl.training.setup")
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        self.returncode: int | None = None
        self.pid = _fork()
        if self.pid == 0:
            os._exit(self._run(work, variables))

    def _run(self, work: Callable[[], object], variables: dict[str, str]) -> int:
        """Work with its own output; never raise, since the fork must not continue a test."""
        try:
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._out, 1)
            os.dup2(self._err, 2)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True)
                for n in (1, 2)
            )
            warnings.resetwarnings()
            warnings.simplefilter("default")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return code

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end, or kill it; return the output and the error text."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.output(), _content(self._err)

    def output(self) -> str:
        """Return the output so far."""
        return _content(self._out)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _content(descriptor: int) -> str:
    """Return what is in a file that a fork writes to, without moving its position."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


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
        pid = _fork()
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


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that do not matter
        return os.fork()


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
