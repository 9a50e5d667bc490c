"""Run the command line: register all commands, dispatch, exit with the right code."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence

import typer

from ssdctl.cli import (
    benchmark,
    config,
    dataset,
    demo,
    doctor,
    download,
    evaluate,
    export,
    fetch_weights,
    launch,
    models,
    predict,
    prepare,
    push,
    report,
    runs,
    train,
)
from ssdctl.cli.app import app, click_root
from ssdctl.cli.command import exit_as_bug
from ssdctl.cli.console import STDOUT, Console
from ssdctl.errors import DiskError, ExitCode, Interrupted

# In the order of `ssdctl --help`. Importing a module registers its command with `app`.
MODULES = (
    demo,
    download,
    prepare,
    dataset,
    fetch_weights,
    train,
    launch,
    runs,
    models,
    evaluate,
    predict,
    export,
    push,
    report,
    doctor,
    config,
    benchmark,
)
COMMANDS = tuple(module.__name__.rpartition(".")[2] for module in MODULES)


def _position(info: typer.models.CommandInfo | typer.models.TyperInfo) -> int:
    return COMMANDS.index(str(info.name).replace("-", "_"))


app.registered_commands.sort(key=_position)
app.registered_groups.sort(key=_position)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of the documented codes.

    If the reader of stdout is closed, as with `| head`, the exit code is that of an output that
    cannot be written, without a message.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        click_root(_module_of(arguments)).main(args=arguments, prog_name="ssdctl")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's exit code for it is 1
            raise SystemExit(ExitCode.DISK) from None
        raise
    except KeyboardInterrupt:  # before a command runs
        raise SystemExit(Interrupted.exit_code) from None
    except Exception as error:
        if _is_interrupt(error):
            raise SystemExit(Interrupted.exit_code) from None
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            # typer itself writes --help and --version
            Console().error(DiskError(f"no space left while writing {error.filename or STDOUT}"))
            raise SystemExit(DiskError.exit_code) from None
        exit_as_bug()


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C is the cause: Python 3.11 wraps what ends the creation of a class."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__
    return False


def click_tree() -> typer.core.TyperGroup:
    """Return all commands with all their options, for man pages and completion."""
    return click_root()


def _module_of(arguments: Sequence[str]) -> str:
    """Return the module of the command on the command line."""
    name = next((a for a in arguments if not a.startswith("-")), "")
    return name.replace("-", "_")
