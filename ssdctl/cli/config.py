"""`ssdctl config`: show the settings and their sources, check and write config files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ssdctl.cli.command import Call, command, command_group
from ssdctl.cli.console import aligned, table
from ssdctl.config import render
from ssdctl.config.resolve import (
    DEFAULT_FILE,
    PRESET_DIR,
    nearest_key,
    preset_overrides,
    resolve,
    setting_path,
)
from ssdctl.config.settings import Kind, all_settings
from ssdctl.errors import UsageError
from ssdctl.files import has_content, write_text
from ssdctl.runtime.safe_text import quoted

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

PRESETS_IN_A_ROW = 3  # fit 80 columns
group = command_group("config", "This machine", "Show settings, check and write config files.")


@command(
    "show",
    group,
    takes_train_options=True,
    examples=[
        "ssdctl config show --preset nvidia-r50",
        "ssdctl config show train.lr train.warmup   # only these, with their meaning",
        "ssdctl config show slurm",
        "ssdctl config show --json",
    ],
)
def show(
    call: Call,
    keys: Annotated[
        list[str] | None,
        Argument(
            help="Settings or tables to show with their meaning [default: all]",
            metavar="KEY...",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show settings, their values and the source of each value."""
    values, sources = render.values(call.config), call.config.sources
    paths = [path for key in keys or [] for path in _paths_of_key(key)] or list(values)
    data = {path: {"value": values[path], "source": sources[path].label} for path in paths}
    call.console.result(data, lambda: _table(data, with_help=bool(keys)))


def _paths_of_key(key: str) -> list[str]:
    paths = [path for path in all_settings() if key == path.partition(".")[0]]
    if (path := setting_path(key)) is not None:
        paths.append(path)
    if not paths:
        raise UsageError(f"unknown key {key!r}", hint=nearest_key(key))
    return paths


def _table(data: dict[str, dict[str, Any]], *, with_help: bool) -> Table:
    rows = []
    for path, entry in data.items():
        value = entry["value"]
        text = "-" if value is None else render.toml_value(value)
        rows.append([path, text, entry["source"], *[all_settings()[path].help] * with_help])
    columns = ["key", "value", "source", *["meaning"] * with_help]
    settings = table(*columns, rows=rows, left=range(4))
    for column in settings.columns[:3]:
        column.overflow = "fold"
    return settings


@command("validate", group, is_isolated=True, examples=["ssdctl config validate ssdctl.toml"])
def validate(
    call: Call,
    file: Annotated[
        str | None, Argument(help="Config file", metavar="FILE", show_default=False)
    ] = None,
) -> None:
    """Check the keys and values of a config file."""
    file = file or call.config_file or DEFAULT_FILE
    sources = resolve(file=file, environment={}).sources.values()  # only the file
    keys = sum(source.kind is Kind.FILE for source in sources)
    call.console.result({"file": file, "valid": True, "keys": keys}, f"{file}: {keys} keys, valid")


@command("schema", group, is_isolated=True, examples=["ssdctl config schema > ssdctl.schema.json"])
def schema(call: Call) -> None:
    """Print the JSON schema of config files."""
    import json

    data = render.json_schema()
    call.console.result(data, json.dumps(data, indent=2))


@command(
    "presets",
    group,
    is_isolated=True,
    examples=["ssdctl config presets", "ssdctl config presets --json"],
)
def presets(call: Call) -> None:
    """Compare the presets."""
    names = all_settings()["train.preset"].choices
    recipes = {name: {o.path: o.value for o in preset_overrides(name)} for name in names}
    call.console.result(recipes, lambda: _preset_tables(recipes))


def _preset_tables(recipes: dict[str, dict[str, object]]) -> Group:
    from rich.console import Group

    paths = dict.fromkeys(path for recipe in recipes.values() for path in recipe)
    tables: list[Table | str] = []
    for start in range(0, len(recipes), PRESETS_IN_A_ROW):
        names, rows = list(recipes)[start : start + PRESETS_IN_A_ROW], []
        for path in paths:
            values = [recipe.get(path) for recipe in recipes.values()]
            shown = [recipes[name].get(path) for name in names]
            if any(value != values[0] for value in values) and any(v is not None for v in shown):
                rows.append([path.partition(".")[2], *map(render.plain_value, shown)])
        tables += [table("", *names, rows=rows, left=range(PRESETS_IN_A_ROW + 1)), ""]
    texts = [(PRESET_DIR / f"{name}.toml").read_text(encoding="utf-8") for name in recipes]
    about = [(name, text.partition("\n")[0][2:]) for name, text in zip(recipes, texts, strict=True)]
    return Group(*tables, aligned(about))


@command(
    "init",
    group,
    is_isolated=True,
    settings="train.preset",
    examples=["ssdctl config init", "ssdctl config init --preset mlperf-r34 mlperf.toml"],
)
def init(
    call: Call,
    file: Annotated[
        str, Argument(help="File to write", metavar="FILE", show_default=False)
    ] = DEFAULT_FILE,
    force: Annotated[bool, Option("--force", help="Overwrite the file")] = False,
) -> None:
    """Write a commented config file with every setting.

    Uncomment a line to change a setting.
    """
    path = Path(file)
    if has_content(path, "FILE") and not force:
        raise UsageError(f"{path}: already exists", hint="use --force to overwrite it")
    write_text(path, render.to_template_toml(call.config))
    call.console.result({"file": file}, f"wrote {file}")
    option = "" if file == DEFAULT_FILE else f" --config {quoted(file)}"
    call.console.closing([], [f"ssdctl config validate {quoted(file)}", f"ssdctl train{option}"])
