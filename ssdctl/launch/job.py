"""What to run on this machine: a command, or a script or manifest for a batch engine."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssdctl.runtime.safe_text import redact_arguments


@dataclass(frozen=True)
class Job:
    """A planned launch. Each argument of the user is one element of `argv`: no shell parses it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]  # added to the caller's
    launcher: str
    num_ranks: int  # ranks that run on this machine, or report to it
    nodes: int = 1  # if it is 1, all ranks record their exit codes on this machine
    # The signal that the launcher forwards to all ranks. It is repeated, because mpirun forwards it
    # only to the ranks that have started. None: signal the ranks on this machine directly.
    stop_signal: signal.Signals | None = None
    missing: str | None = None  # what the user must still specify
    text: str | None = None  # the script or manifest for a batch engine
    manifest: Mapping[str, Any] | None = None  # the same as data, for Kubernetes
    warnings: tuple[str, ...] = ()

    def to_line(self, *, with_secrets: bool = True) -> str:
        """Return the command as one line for a shell."""
        pairs, argv = [f"{n}={value}" for n, value in self.environment.items()], list(self.argv)
        if not with_secrets:
            pairs, argv = redact_arguments(pairs), redact_arguments(argv)
        words = [pair.partition("=") for pair in pairs]
        return " ".join([*(f"{n}={shlex.quote(value)}" for n, _, value in words), shlex.join(argv)])

    def to_script(self) -> str:
        """Return the text for `--write`: a bash script, or the input of the batch engine."""
        if self.text is not None:
            return self.text
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])
