"""Generate the pages of all commands and all settings (a hook of mkdocs, see mkdocs.yml).

Both are made when the site is built, from what the command line and the config are made from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File

from ssdctl.cli.main import click_root
from ssdctl.config.render import toml_value
from ssdctl.config.resolve import preset_overrides
from ssdctl.config.settings import Setting, all_settings

DEFAULT_PRESET = "stable-r34"
COMMANDS = """# Commands

Every option of every command, as `ssdctl COMMAND --help` prints them. Config files and environment
variables use the key of an option's setting: see [Settings](settings.md).
"""
SETTINGS = """# Settings

A value comes from, in ascending order of precedence:

1. the default, or the preset;
2. `ssdctl.toml`, or `--config FILE`;
3. the environment, such as `SSDCTL_TRAIN__BATCH_SIZE=64`;
4. the command line: the option, or `--set train.batch_size=64`.

`ssdctl config show` prints each value with its source. `ssdctl config init` writes a commented
file.
`ssdctl config schema` prints the JSON schema for editors. Defaults marked "preset" are set by every
preset: the value is that of the default preset, `stable-r34`. [Presets](#presets) compares them.
"""
REFERENCE = '<div class="reference" markdown>\n'


def on_files(files: Any, *, config: Any) -> None:
    """Add the pages."""
    files.append(File.generated(config, "commands.md", content=commands_page()))
    files.append(File.generated(config, "settings.md", content=settings_page()))


def commands_page() -> str:
    """Return the reference of all commands as Markdown."""
    lines = [COMMANDS]
    tree = click_root()
    commands = dict(_commands("ssdctl", tree))
    train = {option.name for option in tree.commands["train"].params}
    everywhere = set.intersection(*({p.name for p in c.params} for c in commands.values()))
    shared = [p for p in commands["ssdctl train"].params if p.name in everywhere]
    lines += ["All commands have these options:", "", *_options(shared)]
    for path, command in commands.items():
        text, _, examples = _plain(command.help).partition("\n\nExamples\n")
        arguments = [p.metavar for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([path, "[OPTIONS]", *map(str, arguments)])
        lines += [f"## {path}", "", text, "", f"```text\n{usage}\n```", ""]
        options = [option for option in command.params if option.name not in everywhere]
        if path == "ssdctl launch":
            options = [option for option in options if option.name not in train]
            lines += ["`launch` also takes every option of [`ssdctl train`](#ssdctl-train).", ""]
        lines += _options(options)
        if examples:
            shown = "\n".join(line.removeprefix("$ ") for line in examples.splitlines())
            lines += [f"```bash\n{shown}\n```", ""]
    return "\n".join(lines)


def _commands(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if children := getattr(command, "commands", None):
            assert children
            yield from _commands(f"{path} {name}", command)
        elif not command.hidden:
            yield f"{path} {name}", command


def _options(parameters: list[Any]) -> list[str]:
    rows = []
    for parameter in parameters:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        meaning = _escaped(_plain(parameter.help))
        if parameter.param_type_name == "argument":
            flags = str(parameter.metavar)
        else:
            flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
            metavar = parameter.metavar or ""
            if "|" in metavar and metavar.islower():  # choices
                meaning += ": " + ", ".join(f"`{choice}`" for choice in metavar.split("|"))
            elif not parameter.is_flag:
                flags += f" {metavar or 'VALUE'}"
        setting = all_settings().get((parameter.name or "").replace("__", ".", 1).split("__")[0])
        key = f"`{setting.path}`" if setting else ""
        rows.append(_row(f"`{flags}`", meaning, key))
    if not rows:
        return []
    return [
        REFERENCE,
        _row("option", "meaning", "setting"),
        "|---|---|---|",
        *rows,
        "",
        "</div>",
        "",
    ]


def settings_page() -> str:
    """Return the reference of all settings as Markdown."""
    recipe = {override.path: override.value for override in preset_overrides(DEFAULT_PRESET)}
    lines = [SETTINGS]
    section = ""
    for setting in all_settings().values():
        if setting.section != section:
            lines += ["", "</div>", ""] if section else []
            section = setting.section
            lines += [f"## {section}", "", REFERENCE, _row("key", "default", "meaning", "option")]
            lines.append("|---|---|---|---|")
        value = recipe.get(setting.path) if setting.is_recipe else setting.default
        default = "" if value in (None, ()) else f"`{toml_value(value)}`"
        default += " (preset)" if setting.is_recipe else ""
        flags = ", ".join(f"`{flag}`" for flag in setting.flags if not flag.startswith("--no-"))
        meaning = _escaped(_plain(setting.help)) + _choices(setting)
        lines.append(_row(f"`{setting.name}`", default, meaning, flags))
    return "\n".join([*lines, "", "</div>", "", *_presets()])


def _choices(setting: Setting) -> str:
    return f": {', '.join(f'`{c}`' for c in setting.choices)}" if setting.choices else ""


def _presets() -> list[str]:
    names = all_settings()["train.preset"].choices
    recipes = {name: {o.path: o.value for o in preset_overrides(name)} for name in names}
    lines = [
        "## Presets",
        "",
        "Only the keys whose values differ. `ssdctl config presets` prints all.",
        "",
    ]
    lines += [_row("key", *(f"`{name}`" for name in names)), "|---" * (len(names) + 1) + "|"]
    for path in dict.fromkeys(path for recipe in recipes.values() for path in recipe):
        cells = [f"`{toml_value(r[path])}`" if path in r else "" for r in recipes.values()]
        if len(set(cells)) > 1:
            lines.append(_row(f"`{path}`", *cells))
    return [*lines, "", "</div>", ""]


def _row(*cells: str) -> str:
    """Return a row of a table. A `|` in inline code does not end its cell."""
    return "| " + " | ".join(cell.replace("\n", " ") for cell in cells) + " |"


def _plain(text: str | None) -> str:
    """Return the text without rich's markup and its escapes."""
    return re.sub(r"\[/?bold\]", "", text or "").replace("\\[", "[")


def _escaped(text: str) -> str:
    """Return the text so that Markdown prints it literally, except for inline code."""
    return re.sub(r"(`[^`]*`)|([*_<>|\[\]])", lambda m: m[1] or f"\\{m[2]}", text)
