"""Run a parser on one input as a command would: what every fuzz target is made of.

Most inputs go to the parser inside the boundary that turns errors into exit codes
(`with_exit_codes`), one in `COMMAND_EVERY` through the whole command.
"""

from __future__ import annotations

import io
import itertools
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

from conftest import Result
from hypothesis import strategies as st

from ssdctl.cli.command import with_exit_codes
from ssdctl.cli.console import Console
from ssdctl.errors import ExitCode

COMMAND_EVERY = 100


class Target(NamedTuple):
    """A parser: its mutated inputs, and a function that gives it one."""

    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], Result]


def as_command(work: Callable[[], object]) -> Result:
    """Run `work` inside the boundary of a command. An unexpected exception is a bug."""
    err = io.StringIO()
    code = 0
    with redirect_stderr(err):
        try:
            console = Console()
            with console.show_log():
                with_exit_codes(console, lambda: work() and None)
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:
            code = ExitCode.BUG
            traceback.print_exc()
    return Result(code, "", err.getvalue())


def file_target(
    path: Path,
    inputs: st.SearchStrategy[bytes],
    parse: Callable[[], object],
    command: Callable[[], Result] | None = None,
) -> Target:
    """Write each input to `path`, then parse it, sometimes by the whole command."""
    numbers = itertools.count()

    def write_and_run(content: bytes) -> Result:
        path.write_bytes(content)
        if command is not None and next(numbers) % COMMAND_EVERY == 0:
            return command()
        return as_command(parse)

    return Target(inputs, write_and_run)
