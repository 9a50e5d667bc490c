"""Results of checks, without secrets, and the programs that checks run."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssdctl.runtime.safe_text import redact_urls

OK, WARN, FAIL = "ok", "warn", "fail"
ABSENT = "absent"  # optional, and not wanted by the config
DRIVER_S = 20.0  # for a driver's own tool
IMPORT_S = 120.0  # for what imports torch: a minute on a cold network file system
DYING_S = 2.0  # a process in uninterruptible sleep in a driver cannot be killed
PROBES = f"{__package__}.probes"


class Check(NamedTuple):
    """One result: `state` is ok, warn, fail or absent; `remedy` is what to do about it."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    group: str = ""  # its heading in the output


def ok(name: str, detail: str, remedy: str = "") -> Check:
    return Check(name, OK, detail, remedy)


def bad(name: str, detail: str, remedy: str, *, is_wanted: bool = False) -> Check:
    """Return a problem: a failure if the config needs what has it, else a warning."""
    return Check(name, FAIL if is_wanted else WARN, detail, remedy)


def ok_unless(name: str, detail: str, remedy: str) -> Check:
    """Return a warning if there is a remedy, else that all is well."""
    return Check(name, WARN if remedy else OK, detail, remedy)


def absent(name: str, detail: str, remedy: str = "", *, is_wanted: bool = False) -> Check:
    """Return the result for an absent component: a failure only if the config needs it."""
    return Check(name, FAIL, detail, remedy) if is_wanted else Check(name, ABSENT, detail)


def without_secrets(text: str) -> str:
    """Return the text without passwords and queries of URLs, the home folder and the user's name.

    Paths stay usable in a shell: ~/coco, /scratch/$USER/coco.
    """
    # Colors of other programs, and control characters.
    text = re.sub(r"\033\[[0-9;]*[A-Za-z]|[\0-\037\177]+", " ", text).strip()
    text = redact_urls(text)
    with contextlib.suppress(RuntimeError):  # an id without a home, as in some containers
        home = str(Path("~").expanduser())
        if len(home) > 1:
            text = re.sub(rf"(?<![\w/.-]){re.escape(home)}(?![\w.-])", "~", text)
    with contextlib.suppress(OSError, KeyError):  # an id without a name
        user = re.escape(getpass.getuser())
        text = re.sub(rf"(?<=/){user}(?=/|$|[\s:,;)'\"])", "$USER", text)
    return text


class ProgramOutput(NamedTuple):
    """Output and error text of a program."""

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


class Programs:
    """Run programs that may hang or crash, with time limits; `stop` ends all of them."""

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
    ) -> ProgramOutput:
        """Run a program to its end, in a session of its own.

        Args:
            timeout_s: After this time it is killed with its children; its output so far is kept.
            text: Its stdin.
            environment: Its variables; None is this process's environment.
        """
        pipe = subprocess.PIPE
        try:
            with self._lock:
                if self._is_over:
                    raise InterruptedError(0, "interrupted")
                process = subprocess.Popen(
                    argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                    env=environment, start_new_session=True,
                )  # fmt: skip
                self._running.add(process)
        except OSError as error:
            return ProgramOutput("", f"cannot be run: {error.strerror}")
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

    def run_python(
        self, *arguments: str, timeout_s: float = IMPORT_S, **options: Any
    ) -> ProgramOutput:
        """Run Python with these arguments; `options` are those of `run`."""
        return self.run([sys.executable, "-W", "ignore", *arguments], timeout_s, **options)

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
        out = error.stdout or b""
        return out.decode(errors="replace") if isinstance(out, bytes) else out


def _failure(code: int, stderr: str, out: str) -> str:
    """Return why a program failed: the signal that ended it, else its last line of text."""
    if code == 0:
        return ""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in [*out.splitlines(), *stderr.splitlines()]]
    texts = [line for line in lines if line and not line.startswith("{")]  # those are facts
    return texts[-1] if texts else f"exit code {code}"
