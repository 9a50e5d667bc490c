"""Define the typer application of all commands, and run one command from another."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Annotated

import typer

from ssdctl.cli.command import make_options
from ssdctl.cli.help import HelpGroup
from ssdctl.errors import Stopped

app = typer.Typer(
    name="ssdctl",
    cls=HelpGroup,
    help="Train an object detector on your own images, or SSD300 on COCO across a cluster.",
    epilog="New here? Run `ssdctl demo`. `ssdctl COMMAND -h` shows the most important options of a "
    "command, `ssdctl help COMMAND` all of them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(ctx: typer.Context, is_requested: bool) -> None:
    if is_requested and not ctx.resilient_parsing:
        typer.echo(_versions())
        raise typer.Exit


def _versions() -> str:
    """Return the versions and the device that `--device auto` finds, without importing torch.

    The commit is that of a git checkout from which ssdctl runs; a wheel has none.
    """
    import platform
    from pathlib import Path

    from ssdctl._version import __version__
    from ssdctl.runs.metrics import git_commit
    from ssdctl.runtime.cores import usable_cores
    from ssdctl.runtime.hardware import device_names
    from ssdctl.runtime.packages import package_version

    torch = package_version("torch") or "not installed"
    device = ", ".join(device_names()) or f"cpu, {usable_cores()} cores"
    rows = {"Python": platform.python_version(), "torch": torch, "device": device}
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists() and (commit := git_commit(checkout)):
        rows = {"commit": commit[:12], **rows}
    lines = [f"{name:<8}{value}" for name, value in rows.items()]
    return "\n".join([f"ssdctl {__version__}", *lines])


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show versions and the device"
        ),
    ] = False,
) -> None:
    pass


def run_command(arguments: Sequence[str], *, stdout_to_stderr: bool = False) -> None:
    """Run one command from another one; a failure exits with its code."""
    with contextlib.redirect_stdout(sys.stderr if stdout_to_stderr else sys.stdout):
        click_root().main(args=list(arguments), prog_name="ssdctl", standalone_mode=False)


def click_root(module: str | None = None) -> typer.core.TyperGroup:
    """Return the click command of `app`; only `module`'s commands get their options, if given."""
    make_options(module)
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    return root


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """End the block with exit code 75 on Ctrl-C and SIGTERM; `kept` says what remains."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {kept}", hint="run the same command again to continue") from None
    finally:
        signal.signal(signal.SIGTERM, before)
