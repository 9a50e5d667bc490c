"""`ssdctl`: the commands, in the order in which a user meets them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ssdctl._version import __version__
from ssdctl.cli.command import MARKUP, exit_as_bug, make_options
from ssdctl.config.settings import all_settings
from ssdctl.errors import Interrupted

COMMANDS = (
    "demo",
    "download",
    "prepare",
    "dataset",
    "fetch_weights",
    "train",
    "launch",
    "evaluate",
    "predict",
    "export",
    "report",
    "doctor",
    "config",
    "benchmark",
)

app = typer.Typer(
    name="ssdctl",
    help="Train, evaluate and ship SSD300 detectors, from a laptop to a Gaudi pod.",
    epilog="New here? `ssdctl demo` shows the whole way in minutes, without network.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssdctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit"
        ),
    ] = False,
) -> None:
    pass


def _register() -> None:
    """Import the commands, which add themselves to `app`; put them in the order of `ssdctl --help`,
    whoever imported one of them before."""
    import importlib

    for name in COMMANDS:
        importlib.import_module(f"ssdctl.cli.{name}")
    app.registered_commands.sort(key=_place)
    app.registered_groups.sort(key=_place)


def _place(info: typer.models.CommandInfo | typer.models.TyperInfo) -> int:
    return COMMANDS.index(str(info.name).replace("-", "_"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; every way out is an exit code of the contract.

    (Typer itself ends quietly where the reader of our output went away, as `| head` does.)
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _register()
        refuse_old_options(arguments)
        make_options(_module_of(arguments))
        typer.main.get_command(app).main(args=arguments, prog_name="ssdctl")
    except KeyboardInterrupt:  # before a command had begun
        raise SystemExit(Interrupted.exit_code) from None
    except Exception:
        exit_as_bug()


def click_tree() -> typer.core.TyperGroup:
    """All commands with all their options: what man pages and completion words are made of."""
    _register()
    make_options()
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    return root


def _module_of(arguments: Sequence[str]) -> str:
    """The module of the command that is called."""
    name = next((a for a in arguments if not a.startswith("-")), "")
    return name.replace("-", "_")


def run_command(arguments: Sequence[str], *, stdout_to_stderr: bool = False) -> None:
    """Run one command inside another; a failure exits with its code."""
    make_options()
    root = typer.main.get_command(app)
    with contextlib.redirect_stdout(sys.stderr if stdout_to_stderr else sys.stdout):
        root.main(args=list(arguments), prog_name="ssdctl", standalone_mode=False)


# Options of the replaced systems that no single setting stands for.
ELSEWHERE = {
    "-d": "--data (the dataset folder), or --bf16 and --fp32 (Habana-TF's type)",
    "-s": "--seed, or --steps (Habana-TF's)",
    "--mode": "a command, ssdctl evaluate CKPT or ssdctl benchmark train",
    "--inference": "a command, ssdctl predict CKPT IMAGE",
    "--vis_dataloader": "ssdctl prepare --preview FILE",
    "--benchmark-iterations": "--seconds of ssdctl benchmark train",
    "--benchmark-warmup": "not needed: ssdctl benchmark train warms up by itself",
    "--use_horovod": "ssdctl launch --hpus N",
    "--hvd_workers": "ssdctl launch --hpus N",
    "--num_cores": "ssdctl launch --tpus N",
    "--local_rank": "not needed: launchers tell it by their variables",
}


def refuse_old_options(arguments: Sequence[str]) -> None:
    """Exit 2 on an option of the replaced systems, however it is spelt, naming ours."""
    exact = {old: setting for setting in all_settings().values() for old in setting.replaces}
    known = {_bare(flag) for setting in all_settings().values() for flag in setting.flags}
    bare = {_bare(old): s for old, s in exact.items() if _bare(old) not in known}
    for argument in arguments:
        if argument == "--":
            return
        old = argument.partition("=")[0]
        setting = exact.get(old) or (bare.get(_bare(old)) if old.startswith("--") else None)
        new = ELSEWHERE.get(old)
        if setting is not None:
            whose = f" of ssdctl evaluate ({setting.path})" if setting.section == "evaluate" else ""
            new = f"{' / '.join(setting.flags)}{whose}: {setting.help}"
        if new is not None:
            typer.echo(f"error: {old} is now {new}", err=True)
            raise SystemExit(2)


def _bare(option: str) -> str:
    """The option however it is written: --batch-size, --batch_size, --batchsize."""
    return option.replace("-", "").replace("_", "").lower()
