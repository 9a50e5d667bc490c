"""Run programs that may hang or crash, in parallel, each in a subprocess."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
DRIVER_S = 20.0  # for a driver's own tool
IMPORT_S = 120.0  # for what imports torch: a minute on a cold network file system
DYING_S = 2.0  # a process in uninterruptible sleep in a driver cannot be killed


class ProbeOutput(NamedTuple):
    """Output and error text of a subprocess."""

    out: str
    problem: str = ""  # one line; empty if it succeeded

    def facts(self) -> dict[str, Any]:
        """Return the merged JSON lines of a probe, including those before a failure."""
        facts: dict[str, Any] = {}
        for line in self.out.splitlines():
            with contextlib.suppress(ValueError):
                if line.startswith("{"):
                    facts |= json.loads(line)
        return facts


def report(**facts: object) -> None:
    """Print facts in a probe, for `ProbeOutput.facts`; a later crash does not lose them."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class ProbeRunner:
    """Run programs with time limits; `stop` ends all of them."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def run(
        self,
        argv: Sequence[str],
        timeout_s: float,
        text: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> ProbeOutput:
        """Run a program to its end.

        Args:
            argv: The program and its arguments.
            timeout_s: After this time it is killed with its children; its output so far is kept.
            text: Its stdin.
            environment: Its variables; None is this process's environment.
        """
        try:
            process = self._start(argv, environment)
        except OSError as error:
            return ProbeOutput("", f"cannot be run: {error.strerror}")
        is_late = False
        try:
            out, stderr = process.communicate(text, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            is_late = True
            out, stderr = _kill(process)
        finally:
            with self._lock:
                self._running.discard(process)
        if is_late:
            return ProbeOutput(out, f"no answer within {timeout_s:g} s")
        if process.returncode:
            return ProbeOutput(out, _reason(process.returncode, stderr, out))
        return ProbeOutput(out)

    def run_python(self, code: str) -> ProbeOutput:
        """Run a Python program given as text."""
        return self.run([sys.executable, "-W", "ignore", "-c", code], IMPORT_S)

    def run_probe(
        self,
        name: str,
        timeout_s: float,
        *arguments: str,
        text: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> ProbeOutput:
        """Run one of this package's probes."""
        module = f"{__package__}.{name}_probe"
        argv = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        return self.run(argv, timeout_s, text, environment)

    def _start(
        self, argv: Sequence[str], environment: Mapping[str, str] | None
    ) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_over:
                raise InterruptedError(0, "interrupted")
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
            return process

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


def _kill(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill a program and its children; return its output so far."""
    _signal(process)
    try:
        return process.communicate(timeout=DYING_S)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        return (out.decode(errors="replace") if isinstance(out, bytes) else out), ""


def _reason(code: int, stderr: str, out: str) -> str:
    """Return why a program failed: the signal that ended it, else its last line of text."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in [*out.splitlines(), *stderr.splitlines()]]
    texts = [line for line in lines if line and not line.startswith("{")]  # those are facts
    return texts[-1] if texts else f"exit code {code}"
