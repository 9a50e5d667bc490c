"""How a command gets its options: from the settings of the schema, so nothing is said twice.

    @command(app, "train", panel="Train", settings=["data.*", "train.*"], examples=[...])
    def train(call: Call, dry_run: Annotated[bool, typer.Option(...)] = False) -> None:
        call.config.train.lr ...

The options of the settings and the common ones (--config, --set, --json, -q, -v) are added to the
function's own; the function gets the resolved config. Expected failures become one message and
their exit code.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import traceback
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import typer

from ssdctl.cli.console import Console
from ssdctl.cli.option_aliases import AliasCommand
from ssdctl.config.resolve import Override, Resolved, parse_assignment, resolve
from ssdctl.config.schema import Config
from ssdctl.config.settings import Setting, select
from ssdctl.errors import Interrupted, SsdctlError, UsageError
from ssdctl.runtime.printable import printable
from ssdctl.runtime.redact import redact_urls

COMMON = "Common"
LONGEST_METAVAR = 24
NARROW = 72  # columns; below, tables would cut the options' names
MARKUP: Literal["rich"] | None = "rich" if shutil.get_terminal_size().columns >= NARROW else None


class Call(NamedTuple):
    """One call of a command: its config, its console, and the options given."""

    resolved: Resolved
    console: Console
    config_file: str | None
    assignments: list[str]
    overrides: list[Override]

    @property
    def config(self) -> Config:
        return self.resolved.config


def command(
    app: typer.Typer,
    name: str,
    *,
    panel: str | None = None,
    settings: Sequence[str] = (),
    examples: Sequence[str] = (),
    more_options: Sequence[inspect.Parameter] = (),
    is_isolated: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command.

    Args:
        app: The application or group.
        name: The command's name.
        panel: The heading under which `ssdctl --help` lists it.
        settings: The settings that are its options (`train.*`, `data.root`).
        examples: Command lines for `--help`.
        more_options: Options made from a table; the function takes them as `**options`.
        is_isolated: Leave ./ssdctl.toml and SSDCTL_* variables out: for commands that repair them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        chosen: list[Setting] = []

        def run(**given: Any) -> None:
            console = Console(
                as_json=given.pop("as_json"),
                quiet=given.pop("quiet"),
                verbose=given.pop("verbose"),
            )
            with console.show_log():
                with_exit_codes(
                    console, lambda: function(_call(console, chosen, given, is_isolated), **given)
                )

        def add_options() -> None:
            chosen.extend(select(*settings) if settings else [])
            _, *own = inspect.signature(function, eval_str=True).parameters.values()
            own = [*more_options, *(p for p in own if p.kind is not p.VAR_KEYWORD)]
            for parameter in own:
                _take_no_value(parameter)
            parameters = [*own, *_setting_parameters(chosen), *_common_parameters()]
            _sign(run, parameters)

        class Command(AliasCommand):
            settings = chosen

        run.__name__ = function.__name__
        _sign(run, [])
        _without_options.append((function.__module__.rpartition(".")[2], add_options))
        app.command(
            name,
            cls=Command,
            help=_flowing(inspect.getdoc(function) or "") + _examples(examples),
            rich_help_panel=panel,
            context_settings={"help_option_names": ["-h", "--help"]},
        )(run)
        return function

    return register


def _sign(run: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a function the signature that typer is to read."""
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}


# Commands whose options are still to be made: (module, how). Hundreds of options would take half of
# the time that `ssdctl --help` has, which shows none of them.
_without_options: list[tuple[str, Callable[[], None]]] = []


def make_options(module: str | None = None) -> None:
    """Give the commands of a module (None: all) their options, before typer looks at them."""
    for entry in list(_without_options):
        if module in (None, entry[0]):
            entry[1]()
            _without_options.remove(entry)


def with_exit_codes(console: Console, work: Callable[[], None]) -> None:
    """Run a command's work; turn expected failures into one message and their exit code."""
    try:
        work()
    except SsdctlError as error:
        if console.verbose:
            _print_traceback()
        console.error(error)
        raise SystemExit(error.exit_code) from None
    except UnicodeEncodeError as error:
        problem = _encoding_problem(error)
        console.error(problem)
        raise SystemExit(problem.exit_code) from None
    except KeyboardInterrupt:
        console.error(Interrupted("interrupted"))
        raise SystemExit(Interrupted.exit_code) from None


def _print_traceback() -> None:
    sys.stderr.write(printable(redact_urls(traceback.format_exc())))


def _encoding_problem(error: UnicodeEncodeError) -> UsageError:
    """Explain a name that cannot be written: not UTF-8, or not in the locale's encoding."""
    text = error.object[max(0, error.start - 60) : error.end + 20]
    if any("\ud800" <= letter <= "\udfff" for letter in error.object[error.start : error.end]):
        return UsageError(f"{text!r}: the name is not UTF-8 text", hint="rename the file or folder")
    return UsageError(
        f"{text!r}: the locale's encoding ({error.encoding}) does not have these letters",
        hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1",
    )


def _call(
    console: Console, chosen: Sequence[Setting], given: dict[str, Any], is_isolated: bool
) -> Call:
    """Take the settings' values out of `given` and resolve the config."""
    file = given.pop("config_file")
    assignments = given.pop("assignments") or []
    overrides = []
    for setting in chosen:
        for flag, parameter, constant in _options(setting):
            value = given.pop(parameter)
            if value is None or (value is False and constant is not None):
                continue
            if setting.is_flag and value is False:
                flag = setting.flags[1]
            overrides.append(Override(setting.path, constant or value, flag))
    typed = [parse_assignment(text) for text in assignments]
    resolved = resolve(
        file=file,
        overrides=[*typed, *overrides],
        environment={} if is_isolated else None,
        default_file=not is_isolated,
    )
    return Call(resolved, console, file, assignments, overrides)


def _options(setting: Setting) -> list[tuple[str, str, str | None]]:
    """The options of a setting: (flag, parameter name, the constant that the flag stands for)."""
    base = setting.path.replace(".", "__")
    if setting.choice_flags:
        return [(f, base + "__" + f.strip("-"), f.strip("-")) for f in setting.flags]
    return [(setting.flags[0], base, None)]


def _setting_parameters(settings: Sequence[Setting]) -> list[inspect.Parameter]:
    found = []
    for setting in settings:
        for flag, name, constant in _options(setting):
            if constant:
                text = f"{constant} arithmetic"
                option = typer.Option(
                    flag, help=text, metavar="", rich_help_panel=setting.panel, show_default=False
                )
                found.append(_parameter(name, bool, option, default=False))
                continue
            flags = "/".join(setting.flags) if setting.is_flag else flag
            choices = setting.choices
            option = typer.Option(
                flags,
                help=_escaped(setting.help + _choices_note(setting) + _default_note(setting)),
                metavar=_metavar(setting),
                rich_help_panel=setting.panel,
                show_default=False,
                autocompletion=completer(choices) if choices else None,
            )
            kind = bool if setting.is_flag else str
            found.append(_parameter(name, kind | None, option, default=None))
    return found


def _common_parameters() -> list[inspect.Parameter]:
    def option(*flags: str, help: str, metavar: str = "") -> Any:
        return typer.Option(
            *flags, help=help, metavar=metavar, rich_help_panel=COMMON, show_default=False
        )

    config = option(
        "--config", help="Config file (default: ssdctl.toml here, if any)", metavar="FILE"
    )
    assign = option("--set", help="Set any key of the config", metavar="KEY=VALUE")
    return [
        _parameter("config_file", str | None, config, default=None),
        _parameter("assignments", list[str] | None, assign, default=None),
        _parameter("as_json", bool, option("--json", help="Print the result as JSON"), False),
        _parameter("quiet", bool, option("-q", "--quiet", help="Warnings and errors alone"), False),
        _parameter("verbose", bool, option("-v", "--verbose", help="Tracebacks too"), False),
    ]


def _parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _take_no_value(parameter: inspect.Parameter) -> None:
    """Say of a command's own flag that no value follows it."""
    kind, *more = typing.get_args(parameter.annotation)
    if kind is bool:
        more[0].metavar = ""


def _flowing(text: str) -> str:
    """The paragraphs of a docstring without its line ends: the terminal's width decides."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _metavar(setting: Setting) -> str | None:
    """What stands for the value: the choices where they are short."""
    if setting.is_flag:
        return ""  # else typer writes <bool>, as if it took a value
    joined = "|".join(setting.choices)
    if len(joined) > LONGEST_METAVAR:
        return "NAME"
    return joined or setting.metavar


def _choices_note(setting: Setting) -> str:
    is_long = len("|".join(setting.choices)) > LONGEST_METAVAR
    return f": {', '.join(setting.choices)}" if is_long else ""


def _default_note(setting: Setting) -> str:
    if "[default" in setting.help:
        return ""
    if setting.is_recipe:
        return " [default: the preset's]"
    if setting.default is None or setting.default is False:
        return ""
    default = setting.default
    if setting.is_flag:
        default = setting.flags[0]
    return f" [default: {default}]"


def _escaped(text: str) -> str:
    return text.replace("[", r"\[") if MARKUP else text


def completer(choices: Sequence[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [c for c in choices if c.startswith(incomplete)]


def _examples(examples: Sequence[str]) -> str:
    """Below the purpose, above the options, which may be hundreds of lines."""
    if not examples:
        return ""
    lines = [_escaped(f"$ {line}") for line in examples]
    if MARKUP is None:
        return "\n\n\b\n" + "\n".join(["Examples:", *lines])  # \b: lines stay lines
    return "\n\n" + "\n".join(["[bold]Examples[/bold]", *lines])


def exit_as_bug() -> None:
    """Print the traceback of an unexpected exception, and exit 1."""
    _print_traceback()
    sys.stderr.write("This is a bug in ssdctl: please report it with the lines above.\n")
    raise SystemExit(1)
