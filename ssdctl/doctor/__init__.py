"""Check whether this machine can run ssdctl; each problem comes with a remedy. Read-only.

run_checks.py runs all checks in parallel and formats their results. The checks are generators in
machine.py and data.py. What may hang or crash (torch, drivers, third-party programs) runs in a
subprocess, torch in probes.py. Torch is never imported into this process.

Device names are literals here because the results are about them: a device that cannot be opened
has no object of ssdctl.device.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ssdctl.runtime.hardware import find_hardware
from ssdctl.runtime.system import run_in_daemon_thread

if TYPE_CHECKING:
    from ssdctl.config import Config

OK, WARN, FAIL = "ok", "warn", "fail"
FACT = "ssdctl: "  # begins a probe's line of JSON; plugins print, too
ABSENT = "absent"  # optional, and not wanted by the config
DRIVER_S = 20.0  # for a driver's own tool
IMPORT_S = 120.0  # for what imports torch: a minute on a cold network file system
DYING_S = 2.0  # a process in uninterruptible sleep in a driver cannot be killed


class Check(NamedTuple):
    """One result: `state` is ok, warn, fail or absent; `remedy` is what to do about it."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    group: str = ""  # its heading in the output


def result(name: str, detail: str, remedy: str | None = None, *, is_wanted: bool = False) -> Check:
    """Return OK without a remedy; FAIL if the config needs the component, otherwise WARN."""
    if remedy is None:
        return Check(name, OK, detail)
    return Check(name, FAIL if is_wanted else WARN, detail, remedy)


def absent(name: str, detail: str, remedy: str = "", *, is_wanted: bool = False) -> Check:
    """Return the result for an absent component: FAIL if the config needs it, otherwise ABSENT."""
    return Check(name, FAIL, detail, remedy) if is_wanted else Check(name, ABSENT, detail)


class ProgramOutput(NamedTuple):
    """Output and error text of a program."""

    out: str
    problem: str = ""  # one line; empty if it succeeded

    def facts(self) -> dict[str, Any]:
        """Return the merged JSON lines of a probe, including those before a failure."""
        facts: dict[str, Any] = {}
        for line in self.out.splitlines():
            with contextlib.suppress(ValueError):
                if line.startswith(FACT):
                    facts |= json.loads(line.removeprefix(FACT))
        return facts


class Doctor:
    """The config, the cards and the programs that all checks share.

    Programs may hang or crash: each has a time limit, and `stop` ends all of them.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.hardware = config, find_hardware()
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def start_torch(self) -> None:
        """Import torch in a subprocess; the future `torch` has its output."""
        self.torch = run_in_daemon_thread(partial(self.run_probe, "torch", timeout_s=IMPORT_S))

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        text: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> ProgramOutput:
        """Run a program to its end, in a session of its own.

        Args:
            timeout_s: After this time it is killed with its children; its output so far is kept.
            text: What it reads from stdin.
            environment: Its environment variables; None passes this process's.
        """
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_over:
                return ProgramOutput("", "interrupted")
            try:
                process = subprocess.Popen(
                    argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                    env=environment, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return ProgramOutput("", f"cannot be run: {error.strerror}")
            self._running.add(process)
        try:
            out, stderr = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return ProgramOutput(_kill(process), f"no answer within {timeout_s:g} s")
        except BaseException:  # a signal interrupts the main thread
            _kill(process)
            raise
        finally:
            with self._lock:
                self._running.discard(process)
        return ProgramOutput(out, _failure(process.returncode, stderr, out))

    def run_python(self, *arguments: str, timeout_s: float, **options: Any) -> ProgramOutput:
        """Run Python with these arguments and the `options` of `run`."""
        return self.run([sys.executable, "-W", "ignore", *arguments], timeout_s, **options)

    def run_probe(self, *arguments: str, timeout_s: float, **options: Any) -> ProgramOutput:
        """Run a function of probes.py with the `options` of `run`."""
        module = f"{__name__}.probes"
        return self.run_python("-m", module, *arguments, timeout_s=timeout_s, **options)

    def stop(self) -> None:
        """Kill all running programs; later starts fail."""
        with self._lock:
            self._is_over = True
            running = list(self._running)
        for process in running:
            _signal(process)


def _signal(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill(process: subprocess.Popen[str]) -> str:
    """Kill a program and its children; return its output so far."""
    _signal(process)
    try:
        return process.communicate(timeout=DYING_S)[0]
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace")


def _failure(code: int, stderr: str, out: str) -> str:
    """Return the signal that ended a program, else its last line of text; empty if it succeeded."""
    if code == 0:
        return ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in [*out.splitlines(), *stderr.splitlines()]]
    texts = [line for line in lines if line and not line.startswith(FACT)]
    return texts[-1] if texts else f"exit code {code}"
