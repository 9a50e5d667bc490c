"""Help pages: a line with an option's flags, below it its text over the whole width.

`COMMAND --help` shows every option, `COMMAND -h` those that most people need.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import groupby
from typing import Any

import typer

from ssdctl.cli.console import Console

MAX_WIDTH = 120  # longer lines are hard to read
EXAMPLES = "\n\nExamples\n"  # between the description and the examples in `Command.help`
MAX_SHORT_EXAMPLES = 3
COMMON = "Common"  # the heading of the options that every command has
painted = Console().painted


class HelpCommand(typer.core.TyperCommand):
    short_options: Sequence[str] = ()  # for -h, in this order; empty: all
    takes_options_of: str = ""  # the command that explains its hidden options

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(self.page(ctx, is_short=False))

    def page(self, ctx: Any, *, is_short: bool) -> str:
        """Return the help of the command; only with `short_options` if `is_short`."""
        description, _, text = (self.help or "").partition(EXAMPLES)
        paragraphs, examples = description.split("\n\n"), text.splitlines()
        parameters: Sequence[Any] = self.params
        arguments = [p for p in parameters if p.param_type_name == "argument"]
        options = [p for p in parameters if p not in arguments and not p.hidden]
        panels, more = _by_panel(options, lambda option: option), []
        if is_short and self.short_options:
            paragraphs, examples = paragraphs[:1], examples[:MAX_SHORT_EXAMPLES]
            by_flag = {flag: option for option in options for flag in option.opts}
            panels = {"Options": [by_flag[flag] for flag in self.short_options]}
            full = painted(f"{ctx.command_path} --help", "cyan")
            more = [f"{len(options) - len(self.short_options)} more options: {full}"]
        if self.takes_options_of:
            more.append(_wrapped(f"Every option of `ssdctl {self.takes_options_of}` works, too."))
        parts = [*map(_wrapped, paragraphs), f"{painted('Usage:', 'bold')} {usage(self, ctx)}"]
        parts += [_section("Examples", map(_example, examples))] if examples else []
        parts += [_section("Arguments", _rows(arguments))] if arguments else []
        parts += [_section(name, _rows(members)) for name, members in panels.items()]
        return "\n\n".join([*parts, *more]) + "\n"


class HelpGroup(typer.core.TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands)) + 4
        parts = [_wrapped(self.help or ""), f"{painted('Usage:', 'bold')} {usage(self, ctx)}"]
        for panel, names in _by_panel(self.commands, lambda name: self.commands[name]).items():
            rows = []
            for name in names:
                summary = (self.commands[name].help or "").partition("\n\n")[0].removesuffix(".")
                text = _wrapped(summary, " " * width)[width:]
                rows.append("  " + painted(name.ljust(width - 2), "cyan") + text)
            parts.append(_section(panel.replace("Options", "Commands"), rows))
        parts.append(_section("Options", _rows(self.get_params(ctx))))
        formatter.write("\n\n".join([*parts, *filter(None, [_wrapped(self.epilog or "")])]) + "\n")


def show_short_help(ctx: typer.Context, is_requested: bool) -> None:
    if is_requested and not ctx.resilient_parsing:
        assert isinstance(ctx.command, HelpCommand)
        typer.echo(ctx.command.page(ctx, is_short=True), nl=False)
        raise typer.Exit


def usage(command: Any, ctx: Any) -> str:
    """Return the call of a command: `ssdctl evaluate [OPTIONS] CKPT`."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    names = [p.metavar if p.required else f"[{p.metavar.strip('[]')}]" for p in arguments]
    names += ["COMMAND"] if hasattr(command, "commands") else []
    return " ".join([ctx.command_path, "[OPTIONS]", *names])


def _by_panel(items: Iterable[Any], owner: Callable[[Any], Any]) -> dict[str, list[Any]]:
    panels: dict[str, list[Any]] = {}
    for item in items:
        panels.setdefault(owner(item).rich_help_panel or "Options", []).append(item)
    return dict(sorted(panels.items(), key=lambda panel: panel[0] == COMMON))


def _rows(parameters: Iterable[Any]) -> list[str]:
    """Return two or more lines for each parameter; flags with the same text share them."""
    rows = []
    for text, members in groupby(parameters, lambda p: (p.help or "").rstrip(".") + _default(p)):
        rows.append(f"  {painted(', '.join(map(_flags, members)), 'cyan')}")
        rows += [_wrapped(text, " " * 6)] if text else []
    return rows


def _flags(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    flags = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        return f"--[no-]{flags.removeprefix('--')}"
    return flags if parameter.is_flag else f"{flags} {parameter.metavar or 'VALUE'}"


def _default(parameter: Any) -> str:
    value = parameter.default
    if not parameter.show_default or value is None or value is False or value in ((), [], ""):
        return ""
    return f" [default: {value.value if isinstance(value, Enum) else value}]"


def _section(name: str, rows: Iterable[str]) -> str:
    return "\n".join([painted(f"{name}:", "bold"), *rows])


def _example(line: str) -> str:
    """Return an example; its comment is on a line above if both do not fit into one."""
    command, _, comment = line.removeprefix("$ ").partition("   # ")
    is_long = comment and len(line) > min(shutil.get_terminal_size().columns, MAX_WIDTH)
    return f"  # {comment}\n  {command}" if is_long else "  " + line.removeprefix("$ ")


def _wrapped(text: str, indent: str = "") -> str:
    """Wrap a paragraph; words, and defaults such as [stable-r34: 65], stay whole."""
    text = re.sub(r"\[[\w-]+: \S{1,20}\]", lambda note: note[0].replace(" ", "\0"), text)
    wrapper = textwrap.TextWrapper(
        width=min(shutil.get_terminal_size().columns, MAX_WIDTH),
        initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return wrapper.fill(text).replace("\0", " ")
