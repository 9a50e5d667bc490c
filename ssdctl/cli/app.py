"""The application, whose commands get their options when they are needed."""

from __future__ import annotations

from collections.abc import Callable

import typer

from ssdctl.cli.help import HelpGroup

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

# Commands without options so far: (command or group, function that adds them). Creating the
# hundreds of options would take half of the time of `ssdctl --help`, which shows none of them.
without_options: list[tuple[str | None, Callable[[], None]]] = []


def click_root(command: str | None = None) -> typer.core.TyperGroup:
    """Return the click command of `app`; only this command or group gets its options, if given."""
    for entry in list(without_options):
        if command in (None, entry[0]):
            entry[1]()
            without_options.remove(entry)
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    return root
