"""`ssdctl config`: what is set, by whom, and what could be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ssdctl.cli.command import Call, command
from ssdctl.cli.main import app
from ssdctl.config import render
from ssdctl.config.resolve import DEFAULT_FILE, PRESET_DIR, preset_overrides, read_toml, resolve
from ssdctl.config.settings import all_settings
from ssdctl.errors import UsageError
from ssdctl.files import write_text

if TYPE_CHECKING:
    from rich.table import Table

group = typer.Typer(no_args_is_help=True, help="Show, check and start config files.")
app.add_typer(group, name="config", rich_help_panel="This machine")


@command(
    group,
    "show",
    settings=["data.*", "model.*", "train.*"],
    examples=["ssdctl config show --preset nvidia-r50", "ssdctl config show --json"],
)
def show(call: Call) -> None:
    """Show every setting's value and where it came from."""
    values = render.values(call.config)
    sources = call.resolved.sources
    data = {path: {"value": v, "source": sources[path]} for path, v in values.items()}
    call.console.result(data, lambda: _table(call))


def _table(call: Call) -> Table:
    from rich.table import Table

    table = Table("key", "value", "source", box=None, pad_edge=False)
    for path, value in render.values(call.config).items():
        shown = "-" if value is None else render.toml_value(value)
        table.add_row(path, shown, call.resolved.sources[path])
    return table


@command(group, "validate", is_isolated=True, examples=["ssdctl config validate ssdctl.toml"])
def validate(
    call: Call,
    file: Annotated[
        str, typer.Argument(help="Config file", metavar="FILE", show_default=False)
    ] = DEFAULT_FILE,
) -> None:
    """Check a config file: its keys, types, bounds and what they say together."""
    resolve(file=file, environment={})  # the file alone, not this shell's variables
    keys = len(read_toml(Path(file)))
    call.console.result({"file": file, "valid": True, "keys": keys}, f"{file}: {keys} keys, valid")


@command(group, "schema", is_isolated=True, examples=["ssdctl config schema > ssdctl.schema.json"])
def schema(call: Call) -> None:
    """Print the JSON schema of a config file, for editors."""
    import json

    data = render.json_schema()
    call.console.result(data, json.dumps(data, indent=2))


@command(
    group,
    "presets",
    is_isolated=True,
    examples=["ssdctl config presets", "ssdctl config presets --json"],
)
def presets(call: Call) -> None:
    """Show the recipes side by side."""
    names = all_settings()["train.preset"].choices
    recipes = {name: {o.path: o.value for o in preset_overrides(name)} for name in names}
    call.console.result(recipes, lambda: _preset_table(recipes))


def _preset_table(recipes: dict[str, dict[str, object]]) -> Table:
    from rich.table import Table

    table = Table("key", *recipes, box=None, pad_edge=False)
    for path in dict.fromkeys(path for recipe in recipes.values() for path in recipe):
        cells = [render.toml_value(r[path]) if path in r else "-" for r in recipes.values()]
        table.add_row(path, *cells)
    table.caption = "\n".join(
        f"{name}: {(PRESET_DIR / f'{name}.toml').read_text(encoding='utf-8').splitlines()[0][2:]}"
        for name in recipes
    )
    table.caption_justify = "left"
    return table


@command(
    group,
    "init",
    is_isolated=True,
    settings=["train.preset"],
    examples=["ssdctl config init", "ssdctl config init --preset mlperf-r34 mlperf.toml"],
)
def init(
    call: Call,
    file: Annotated[
        str, typer.Argument(help="File to write", metavar="FILE", show_default=False)
    ] = DEFAULT_FILE,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file")] = False,
) -> None:
    """Write a config file with every setting, its meaning and its value.

    The recipe's values are comments: they follow the preset until you set them."""
    path = Path(file)
    if path.exists() and not force:
        raise UsageError(f"{path} exists", hint="--force overwrites it")
    write_text(path, render.to_toml(call.resolved, describe=True))
    call.console.result({"file": file}, f"{file} written; ssdctl reads {DEFAULT_FILE} by itself")
