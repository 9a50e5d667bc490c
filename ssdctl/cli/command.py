"""Register commands, with options generated from the settings of the schema.

    @command(app, "train", panel="Train", settings=["data.*", "train.*"], examples=[...])
    def train(call: Call, dry_run: Annotated[bool, typer.Option(...)] = False) -> None:
        call.config.train.lr ...

The options of the settings and the common ones (--config, --set, --json, -q, -v) are added to the
function's own; the function receives the resolved config. Expected failures are reported in one
message and exit with their code.
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
from ssdctl.config.resolve import Override, Resolved, parse_assignments, resolve
from ssdctl.config.schema import Config
from ssdctl.config.settings import Setting, select
from ssdctl.config.sources import of_call
from ssdctl.errors import DiskError, Interrupted, SsdctlError, UsageError
from ssdctl.runtime.printable import printable
from ssdctl.runtime.redact import redact_urls

COMMON = "Common"
LONGEST_METAVAR = 24
NARROW = 72  # columns; in fewer, the tables would truncate the names of options
MARKUP: Literal["rich"] | None = "rich" if shutil.get_terminal_size().columns >= NARROW else None


class Call(NamedTuple):
    """One call of a command: its config, its console, and the options on its command line."""

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
        settings: The settings that become its options (`train.*`, `data.root`).
        examples: Command lines for `--help`.
        more_options: Options generated from a table; the function takes them as `**options`.
        is_isolated: Ignore ./ssdctl.toml and SSDCTL_* variables: for commands that repair them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        selected: list[Setting] = []

        def run(**values: Any) -> None:
            console = Console(
                as_json=values.pop("as_json"),
                quiet=values.pop("quiet"),
                verbose=values.pop("verbose"),
            )
            with console.show_log():
                with_exit_codes(
                    console,
                    lambda: function(_call(console, selected, values, is_isolated), **values),
                )

        def add_options() -> None:
            selected.extend(select(*settings) if settings else [])
            _, *own = inspect.signature(function, eval_str=True).parameters.values()
            own = [*more_options, *(p for p in own if p.kind is not p.VAR_KEYWORD)]
            for parameter in own:
                _hide_metavar_of_flag(parameter)
            parameters = [*own, *_setting_parameters(selected), *_common_parameters()]
            _set_signature(run, parameters)

        class Command(AliasCommand):
            settings = selected

        run.__name__ = function.__name__
        _set_signature(run, [])
        _without_options.append((function.__module__.rpartition(".")[2], add_options))
        app.command(
            name,
            cls=Command,
            help=_unwrapped(inspect.getdoc(function) or "") + _examples_section(examples),
            rich_help_panel=panel,
            context_settings={"help_option_names": ["-h", "--help"]},
        )(run)
        return function

    return register


def _set_signature(run: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Set the signature of a function that typer reads."""
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}


# Commands without options so far: (module, function that adds them). Creating the hundreds of
# options would take half of the time of `ssdctl --help`, which shows none of them.
_without_options: list[tuple[str, Callable[[], None]]] = []


def make_options(module: str | None = None) -> None:
    """Add the options of a module's commands (None: of all), before typer reads them."""
    for entry in list(_without_options):
        if module in (None, entry[0]):
            entry[1]()
            _without_options.remove(entry)


def with_exit_codes(console: Console, work: Callable[[], None]) -> None:
    """Call `work`; report an expected failure in one message and exit with its code."""
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
    except OSError as error:
        if error.filename is None:  # not a file that the user or an input named
            raise
        if console.verbose:
            _print_traceback()
        console.error(DiskError(f"{error.filename}: {error.strerror}", hint="check the path"))
        raise SystemExit(DiskError.exit_code) from None
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
    console: Console, settings: Sequence[Setting], values: dict[str, Any], is_isolated: bool
) -> Call:
    """Remove the values of settings from `values` and resolve the config."""
    file = values.pop("config_file")
    assignments = values.pop("assignments") or []
    overrides = []
    for setting in settings:
        for flag, parameter, constant in _options(setting):
            value = values.pop(parameter)
            if isinstance(value, list):
                value = ",".join(value) if value else None
            if value is None or (value is False and constant is not None):
                continue
            if setting.is_flag and value is False:
                flag = setting.flags[1]
            overrides.append(Override(setting.path, constant or value, of_call(flag)))
    resolved = resolve(
        file=file,
        overrides=[*parse_assignments(assignments), *overrides],
        environment={} if is_isolated else None,
        default_file=not is_isolated,
    )
    return Call(resolved, console, file, assignments, overrides)


def _options(setting: Setting) -> list[tuple[str, str, str | None]]:
    """Return the options of a setting: (flag, parameter name, constant that the flag sets)."""
    base = setting.path.replace(".", "__")
    if setting.choice_flags:
        return [(f, base + "__" + f.strip("-"), f.strip("-")) for f in setting.flags]
    return [(setting.flags[0], base, None)]


def _setting_parameters(settings: Sequence[Setting]) -> list[inspect.Parameter]:
    parameters = []
    for setting in settings:
        for flag, name, constant in _options(setting):
            if constant:
                text = f"{constant} arithmetic"
                option = typer.Option(
                    flag, help=text, metavar="", rich_help_panel=setting.panel, show_default=False
                )
                parameters.append(_parameter(name, bool, option, default=False))
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
            kind: Any = bool if setting.is_flag else list[str] if setting.is_list else str
            parameters.append(_parameter(name, kind | None, option, default=None))
    return parameters


def _common_parameters() -> list[inspect.Parameter]:
    def option(*flags: str, help: str, metavar: str = "") -> Any:
        return typer.Option(
            *flags, help=help, metavar=metavar, rich_help_panel=COMMON, show_default=False
        )

    config = option(
        "--config", help="Config file (default: ./ssdctl.toml if it exists)", metavar="FILE"
    )
    assign = option("--set", help="Set any key of the config", metavar="KEY=VALUE")
    quiet = option("-q", "--quiet", help="Print only warnings and errors")
    verbose = option("-v", "--verbose", help="Print tracebacks of errors")
    return [
        _parameter("config_file", str | None, config, default=None),
        _parameter("assignments", list[str] | None, assign, default=None),
        _parameter("as_json", bool, option("--json", help="Print the result as JSON"), False),
        _parameter("quiet", bool, quiet, False),
        _parameter("verbose", bool, verbose, False),
    ]


def _parameter(name: str, kind: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _hide_metavar_of_flag(parameter: inspect.Parameter) -> None:
    """Show no placeholder of a value if the parameter is a flag."""
    kind, *more = typing.get_args(parameter.annotation)
    if kind is bool:
        more[0].metavar = ""


def _unwrapped(text: str) -> str:
    """Return the paragraphs of a docstring without line breaks; the terminal wraps them."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _metavar(setting: Setting) -> str | None:
    """Return the placeholder of the value: the choices if they are short."""
    if setting.is_flag:
        return ""  # else typer prints <bool>, as if a value followed
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


def _examples_section(examples: Sequence[str]) -> str:
    """Return the examples as the end of the description, above the options."""
    if not examples:
        return ""
    lines = [_escaped(f"$ {line}") for line in examples]
    if MARKUP is None:
        return "\n\n\b\n" + "\n".join(["Examples:", *lines])  # \b: do not wrap
    return "\n\n" + "\n".join(["[bold]Examples[/bold]", *lines])


def exit_as_bug() -> None:
    """Print the traceback of an unexpected exception, and exit 1."""
    _print_traceback()
    sys.stderr.write("This is a bug in ssdctl: please report it with the lines above.\n")
    raise SystemExit(1)
