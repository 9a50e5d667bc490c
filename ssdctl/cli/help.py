"""The application, its help pages, and the completion of command lines in shells.

`COMMAND --help` shows every option, `COMMAND -h` the most important ones: a line of flags, and
below it the text over the whole width.

The completion scripts (completions/, `ssdctl --install-completion`) are typer's. They call the
program with `_SSDCTL_COMPLETE=complete_SHELL`, and typer answers from the options of the one
command on the line: about 0.15 s, without torch.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from ssdctl.cli.console import painted

MAX_WIDTH = 120  # longer lines are hard to read
EXAMPLES = "\n\nExamples\n"  # between the description and the examples in `Command.help`
MAX_SHORT_EXAMPLES = 3
ZSH_DESCRIPTION = 44  # characters, beside the longest option in 80 columns
COMMON = "Common"  # the heading of the options that every command has
COMPLETION_VARIABLE = "_SSDCTL_COMPLETE"
BASH_WORDS, BASH_POSITION = "COMP_WORDS", "COMP_CWORD"
OTHER_WORDS, POWERSHELL_WORD = "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_WORD_TO_COMPLETE"
# No special characters of shells: zsh evaluates the output, and a run folder may have any name.
PLAIN_WORD = re.compile(r"[\w./+=-]+")

Completer = Callable[[str], list[str]]

_joined = ("", "")  # `--flag=` and the start of its value, if the shell has them in one word


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
    return _click_root(len(without_options))


@functools.lru_cache(maxsize=1)
def _click_root(_number_without_options: int) -> typer.core.TyperGroup:
    root = typer.main.get_command(app)
    assert isinstance(root, typer.core.TyperGroup)
    return root


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


def described(parameter: Any) -> str:
    """Return the flags of an option and its help, in one line."""
    return f"{_flags(parameter)}: {_text(parameter)}"


def _rows(parameters: Iterable[Any]) -> list[str]:
    """Return two or more lines for each parameter; flags with the same text share them."""
    rows = []
    for text, members in groupby(parameters, _text):
        rows.append(f"  {painted(', '.join(map(_flags, members)), 'cyan')}")
        rows += [_wrapped(text, " " * 6)] if text else []
    return rows


def _text(parameter: Any) -> str:
    return (parameter.help or "").rstrip(".") + _default(parameter)


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
    """Return an example; its comment is on a line above if it does not fit beside it."""
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


def is_completion() -> bool:
    return os.environ.get(COMPLETION_VARIABLE, "").startswith("complete_")


def command_line() -> list[str]:
    """Return the words to complete, and leave them to typer in a form that it can read.

    Bash splits `--flag=value` at the `=`, other shells do not split it; and what follows `--` of
    `launch` is a command line of its own.
    """
    global _joined
    is_bash = os.environ[COMPLETION_VARIABLE] == "complete_bash"
    text = os.environ.get(BASH_WORDS if is_bash else OTHER_WORDS, "")
    words = [" ".join(_words(line)) for line in text.split("\n")] if is_bash else _words(text)
    if is_bash:
        position = int(os.environ[BASH_POSITION])
        words = [*words[: position + 1], *[""] * (position + 1 - len(words))]
        words = [w for w in words[:-1] if w != "="] + [words[-1].removeprefix("=")]
    elif not words or text[-1].isspace():
        words.append("")
    if "--" in words[:-1]:
        words = [words[0], *words[words.index("--") + 1 :]]
    flag, equals, value = words[-1].partition("=")
    if equals and flag.startswith("--"):
        _joined = (flag + equals, value)
        words[-1:] = [flag, ""]
        os.environ[POWERSHELL_WORD] = ""
    text = shlex.join(words[:-1]) + (f" {shlex.quote(words[-1])}" if words[-1] else " ")
    os.environ[BASH_WORDS if is_bash else OTHER_WORDS] = text
    os.environ[BASH_POSITION] = str(len(words) - 1)
    _keep_help_plain()
    return words[1:]


def _keep_help_plain() -> None:
    """Keep typer from rendering help with rich: it would wrap it, and take a third of a TAB."""
    with contextlib.suppress(ImportError):  # this release of typer does not render it
        from typer import _completion_classes

        is_zsh = os.environ.get(COMPLETION_VARIABLE) == "complete_zsh"
        vars(_completion_classes)["_sanitize_help_text"] = _first_words if is_zsh else str


def _first_words(text: str) -> str:
    """Shorten a description at a word: zsh cuts it at the end of its line."""
    return textwrap.shorten(text, ZSH_DESCRIPTION, placeholder="...")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote
        return text.split()


def completer(
    choices: Iterable[str] = (),
    metavar: str | None = None,
    parts: Iterable[str] = (),
    problem_of: Callable[[str], str | None] = lambda _: None,
) -> Completer | None:
    """Return typer's `autocompletion` of a value, or None if it can be any text or file.

    Args:
        choices: The values that are always possible.
        metavar: The value's placeholder in `--help`: `RUN` completes run folders, `CKPT` also
            detectors, `KEY=VALUE` the keys of settings.
        parts: Names; the value may be a list of them, `A,B`.
        problem_of: Returns what is wrong with a list.
    """
    kinds = set(re.split(r"[^\w=]", metavar or ""))
    if not (choices or parts) and not kinds & {"KEY=VALUE", "RUN", "CKPT"}:
        return None

    def complete(word: str) -> list[str]:
        prefix, start = _joined if _joined[0] else ("", word)
        values = [*choices, *_values(kinds, start), *parts]
        if parts and "," in start:
            before, _, start = start.rpartition(",")
            values = [p for p in parts if p not in before.split(",")]
            values = [p for p in values if problem_of(f"{before},{p}") is None]
            prefix = f"{prefix}{before},"
        return [prefix + value for value in values if value.startswith(start)]

    return complete


def _values(kinds: set[str], word: str) -> Sequence[str]:
    if "KEY=VALUE" in kinds:
        from ssdctl.config.settings import all_settings

        return [f"{key}=" for key in all_settings()]
    values: list[str] = []
    if "CKPT" in kinds and word:  # an empty word may become any file
        from ssdctl.download.pinned_files import DETECTORS

        values += [detector.name for detector in DETECTORS]
    return values + (_run_folders() if "RUN" in kinds else [])


def _run_folders() -> list[str]:
    from ssdctl.runs.folder import RUNS, RunDir

    folders = [path for pattern in (f"{RUNS}/*", "*", "*/run") for path in Path().glob(pattern)]
    configs = [config for path in folders if (config := RunDir(path).config).is_file()]
    configs.sort(key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in configs if PLAIN_WORD.fullmatch(str(path.parent))]
