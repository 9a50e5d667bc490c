"""Define the typer application of all commands, and run one command from another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ssdctl._version import __version__
from ssdctl.cli.command import MARKUP, make_options

app = typer.Typer(
    name="ssdctl",
    help="Train, evaluate and deploy SSD300 detectors, from a laptop to a Gaudi cluster.",
    epilog="To start, run `ssdctl demo`: it shows every step in minutes, without network.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"ssdctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit"
        ),
    ] = False,
) -> None:
    pass


def run_command(arguments: Sequence[str], *, stdout_to_stderr: bool = False) -> None:
    """Run one command from another one; a failure exits with its code."""
    with contextlib.redirect_stdout(sys.stderr if stdout_to_stderr else sys.stdout):
        click_root().main(args=list(arguments), prog_name="ssdctl", standalone_mode=False)


def click_root(module: str | None = None) -> typer.core.TyperGroup:
    """Return the click command of `app`.

    Args:
        module: The module of `ssdctl.cli` whose commands get their options; None: all modules.
    """
    make_options(module)
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    return root
