"""Run the command line: register all commands, dispatch, exit with the right code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ssdctl.cli import (  # noqa: F401 - importing a module registers its commands
    config,
    demo,
    download,
    export,
    launch,
    machine,
    predict,
    prepare,
    results,
    train,
)
from ssdctl.cli.command import exit_after
from ssdctl.cli.console import STDOUT, Console
from ssdctl.cli.help import app, click_root, command_line, is_completion
from ssdctl.cli.option_aliases import check_local_rank, is_local_rank
from ssdctl.errors import ExitCode, UsageError
from ssdctl.runtime.plugins import plugin_error

AFTER_EQUALS = re.compile(r"^(--[\w-]+=)(~/.*)", re.DOTALL)  # which bash does not expand there
# In the order of `ssdctl --help`.
COMMANDS = (
    *("demo", "download", "prepare", "dataset", "fetch-weights", "train", "launch"),
    *("runs", "models", "evaluate", "predict", "export", "push", "report"),
    *("doctor", "config", "benchmark"),
)
app.registered_commands.sort(key=lambda info: COMMANDS.index(str(info.name)))
app.registered_groups.sort(key=lambda info: COMMANDS.index(str(info.name)))


def _print_versions(ctx: typer.Context, is_requested: bool) -> None:
    """Print the versions and the device that `--device auto` finds, without importing torch.

    The commit is shown if ssdctl runs from a git checkout.
    """
    if not is_requested or ctx.resilient_parsing:
        return
    import platform

    from ssdctl._version import __version__
    from ssdctl.runs.folder import git_commit
    from ssdctl.runtime.hardware import device_names
    from ssdctl.runtime.packages import package_version
    from ssdctl.runtime.system import usable_cores

    rows = {
        "Python": platform.python_version(),
        "torch": package_version("torch") or "not installed",
        "device": ", ".join(device_names()) or f"cpu, {usable_cores()} cores",
    }
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists() and (commit := git_commit(checkout)):
        rows = {"commit": commit[:12], **rows}
    typer.echo("\n".join([f"ssdctl {__version__}", *(f"{n:<8}{v}" for n, v in rows.items())]))
    raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Show versions and the device",
        ),
    ] = False,
) -> None:
    pass


def _expanded(match: re.Match[str]) -> str:
    return match[1] + os.path.expanduser(match[2])  # noqa: PTH111 - the rest stays as it is


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with one of the documented codes.

    If the reader of stdout has ended, as with `| head`, exit with 6 without a message.
    """
    if is_completion():
        arguments = command_line()
    else:
        arguments = list(sys.argv[1:] if argv is None else argv)
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        elif arguments == ["version"]:
            arguments = ["--version"]
    if {"--install-completion", "--show-completion"} & {*arguments[:1]} and arguments[1:]:
        text = f"{arguments[0]} takes no argument: it finds the shell that calls it"
        exit_after(UsageError(text), Console(), STDOUT)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    arguments[:end] = [AFTER_EQUALS.sub(_expanded, argument) for argument in arguments[:end]]
    try:
        if arguments and is_local_rank(arguments[0]):
            check_local_rank()
            del arguments[0]
        command = next((a for a in arguments if not a.startswith("-")), "")
        code = click_root(command).main(args=arguments, prog_name="ssdctl", standalone_mode=False)
        raise SystemExit(code or 0)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer's exit code for it is 1
            raise SystemExit(ExitCode.DISK) from None
        if (problem := plugin_error(end)) is not None:
            exit_after(problem, Console(), STDOUT)
        raise
    except (Exception, KeyboardInterrupt) as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error, err=True)  # the help of a group
            raise SystemExit(ExitCode.USAGE) from None
        if isinstance(error, UnicodeDecodeError) and "--install-completion" in arguments:
            hint = "`ssdctl --show-completion` prints the script to add to it"
            error = UsageError("your shell's startup file is not UTF-8 text", hint=hint)
        exit_after(error, Console(), STDOUT)  # --help and --version are written by typer
