"""Register commands, with options generated from the settings of the schema.

    @command("train", panel="Train", settings="data.* train.*", examples=[...])
    def train(call: Call, dry_run: Annotated[bool, Option(...)] = False) -> None:
        call.config.train.lr ...

The options of the settings and the common ones (--config, --set, --json, -q, -v) are added to the
function's own; the function receives the resolved config. Expected failures are reported in one
message and exit with their code.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from ssdctl.cli.console import Console
from ssdctl.cli.help import (
    COMMON,
    EXAMPLES,
    HelpGroup,
    app,
    completer,
    described,
    is_completion,
    show_short_help,
    usage,
    without_options,
)
from ssdctl.cli.option_aliases import AliasCommand
from ssdctl.config.render import plain_value
from ssdctl.config.resolve import (
    Override,
    of_call,
    parse_assignments,
    preset_overrides,
    resolve,
)
from ssdctl.config.settings import (
    Config,
    Kind,
    Setting,
    all_settings,
    other_programs,
    problem_of,
    select,
)
from ssdctl.distributed import find_ranks
from ssdctl.errors import ExitCode, Interrupted, SsdctlError, Stopped, UsageError
from ssdctl.files import disk_error, refusal_of_disk
from ssdctl.runtime import signals
from ssdctl.runtime.packages import library_error
from ssdctl.runtime.plugins import plugin_error
from ssdctl.runtime.safe_text import printable, redact_urls
from ssdctl.runtime.system import memory_error

TRAIN_SETTINGS = ("data.*", "model.*", "train.*")
OF_TRAINING = ("model.", "train.")
LONGEST_METAVAR = 24
_is_isolated = contextvars.ContextVar("is_isolated", default=False)
# Settings of the recipe that the rule for few images replaces (ssdctl/training/small_data.py).
FITTED = {
    f"train.{name}"
    for name in (
        "epochs", "batch_size", "lr", "warmup", "decay_epochs", "lr_decay", "optimizer",
        "weight_decay",
    )
}  # fmt: skip


class Call(NamedTuple):
    """One call of a command: its config, its console, and the options on its command line."""

    config: Config
    console: Console
    config_file: str | None
    assignments: list[str]
    overrides: list[Override]


def command_group(name: str, panel: str, text: str) -> typer.Typer:
    """Return a group of commands, such as `config show` and `config init`."""
    group = typer.Typer(name=name, cls=HelpGroup, no_args_is_help=True, help=text)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def command(
    name: str,
    group: typer.Typer = app,
    *,
    panel: str | None = None,
    settings: str = "",
    short: str = "",
    examples: Sequence[str] = (),
    more_options: Sequence[inspect.Parameter] = (),
    takes_train_options: bool = False,
    is_isolated: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command.

    Args:
        panel: The heading under which `ssdctl --help` lists it.
        settings: The settings that become its options: `data.root train.*`.
        short: The options that `-h` shows, in this order; none: all of them.
        examples: Command lines for `--help`.
        more_options: Options generated from a table; the function takes them as `**options`.
        takes_train_options: The options of `train` work, too; only its help shows them.
        is_isolated: Ignore ./ssdctl.toml and SSDCTL_* variables: for commands that repair them.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        selected, names = list[Setting](), dict[str, str]()
        run = _runner(function, selected, names, is_isolated=is_isolated)
        patterns = (settings.split(), TRAIN_SETTINGS if takes_train_options else ())
        add = functools.partial(_add_options, run, function, selected, patterns, more_options)
        without_options.append((name if group is app else group.info.name, add))
        group.command(
            name,
            cls=_command_class(selected, names, short, "train" if takes_train_options else ""),
            help=_help(function, examples),
            rich_help_panel=panel,
            context_settings={"help_option_names": ["--help"]},  # -h is an option of its own
        )(run)
        return function

    return register


def _command_class(
    selected: list[Setting], names: dict[str, str], short: str, other: str
) -> type[AliasCommand]:
    class Command(AliasCommand):
        settings, typed = selected, names
        short_options = short.split()
        takes_options_of = other

    return Command


def _help(function: Callable[..., None], examples: Sequence[str]) -> str:
    # Paragraphs without line breaks: the terminal wraps them.
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")
    return text + (EXAMPLES + "\n".join(f"$ {line}" for line in examples) if examples else "")


def _runner(
    function: Callable[..., None],
    selected: Sequence[Setting],
    typed: dict[str, str],
    *,
    is_isolated: bool,
) -> Callable[..., None]:
    """Return the function that typer calls with the values of all options.

    Args:
        typed: The option that was typed for each one that replaces it.
    """

    def run(**values: Any) -> None:
        values.pop("short_help")
        switches = {name: values.pop(name) for name in ("as_json", "quiet", "verbose")}
        console, call = Console(**switches), None
        with console.show_log():
            try:
                _require_working_folder()
                call = _call(console, selected, typed, values, is_isolated)
                function(call, **values)
            except (Exception, KeyboardInterrupt) as error:
                if call is not None and isinstance(error, SsdctlError):
                    _name_sources(error, call, selected, values)
                exit_after(error, console)

    run.__name__ = function.__name__
    _set_signature(run, [])
    return run


def _name_sources(
    error: SsdctlError, call: Call, selected: Sequence[Setting], typed: Mapping[str, Any]
) -> None:
    """Let a message that names an option or a value tell which file or variable sets it.

    Args:
        typed: The command's own arguments and options, besides the `selected` settings.
    """
    message, _ = error.for_command_line()
    options = {f"--{name.replace('_', '-')}" for name in typed}
    options |= {flag for setting in selected for flag in setting.flags}
    listed = (value if isinstance(value, (list, tuple)) else [value] for value in typed.values())
    words = {str(word) for values in listed for word in values}
    words |= {str(override.value) for override in call.overrides}
    found = []
    for path, source in call.config.sources.items():
        if not Kind.FILE <= source.kind < Kind.CALL or source.label in message:
            continue
        setting = all_settings()[path]
        value = getattr(getattr(call.config, setting.section), setting.name)
        flags = [flag for flag in setting.flags if setting in selected or flag not in options]
        has_text = isinstance(value, str) and not setting.choices and value not in words
        # `Path` would shorten the text.
        texts = [value, os.path.abspath(value)] if has_text else []  # noqa: PTH100
        if any(re.search(rf"(?<![\w-]){flag}(?![\w-])", message) for flag in flags) or any(
            message.startswith(f"{text}:") or f"'{text}'" in message for text in texts
        ):
            found.append(source.named(path))
    if found:
        error.end_with(", ".join(found))


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working folder was deleted", hint="cd to another one") from None


def _add_options(
    run: Callable[..., None],
    function: Callable[..., None],
    selected: list[Setting],
    patterns: tuple[Sequence[str], Sequence[str]],
    more_options: Sequence[inspect.Parameter],
) -> None:
    """Add the options to a command; its help hides the second `patterns`."""
    shown, hidden = (select(*part) for part in patterns)
    selected += shown + [setting for setting in hidden if setting not in shown]
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    parameters = [
        *more_options,
        *(p for p in own if p.kind is not p.VAR_KEYWORD),
        *(p for s in selected for p in _parameters(s, is_hidden=s not in shown)),
        *_common_parameters(),
    ]
    for parameter in parameters:
        value = parameter.annotation.__metadata__[0]
        value.autocompletion = value.autocompletion or completer(metavar=value.metavar)
    _set_signature(run, parameters)


def _set_signature(run: Any, parameters: Sequence[inspect.Parameter]) -> None:
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}


@contextlib.contextmanager
def isolated(is_isolated: bool) -> Iterator[None]:
    """Let commands in the block ignore ./ssdctl.toml and SSDCTL_* variables."""
    before = _is_isolated.set(is_isolated)
    try:
        yield
    finally:
        _is_isolated.reset(before)


@contextlib.contextmanager
def stoppable(kept: str) -> Iterator[None]:
    """End the block with exit code 75 on Ctrl-C, too; `kept` says what remains."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"stopped; {kept}", hint="run the same command again") from None


def exit_after(error: BaseException, console: Console, written: object = None) -> NoReturn:
    """Report an expected failure in one message, a bug with its traceback; exit with its code.

    `written` is named by an error of the file system that names no file.
    """
    if isinstance(error, BrokenPipeError):  # the reader of stdout has ended, as with `| head`
        raise SystemExit(ExitCode.DISK) from None
    problem = _expected_error(error, written)
    if problem is None or (console.verbose and isinstance(error, Exception)):
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(printable(redact_urls(text)))
    if problem is None:
        sys.stderr.write("This is a bug in ssdctl: please report it with the lines above.\n")
        raise SystemExit(ExitCode.BUG)
    if not problem.is_from_all_ranks or find_ranks().is_main:  # else the first rank reports it
        console.error(problem)
    raise SystemExit(problem.exit_code) from None


def _expected_error(error: Any, written: object) -> SsdctlError | None:
    if (interrupt := _interrupt(error)) is not None and not isinstance(error, SsdctlError):
        if str(interrupt) in signals.ENDING:
            return Stopped(f"stopped by {interrupt}", hint="run the same command again")
        return Interrupted("interrupted")
    if (named := plugin_error(error)) is not None:  # also an expected one
        return named
    if hasattr(error, "format_message"):
        return _usage_error(error)
    if isinstance(error, UnicodeEncodeError):  # a name
        text = error.object[max(0, error.start - 60) : error.end + 20]
        if any("\ud800" <= letter <= "\udfff" for letter in error.object[error.start : error.end]):
            problem, hint = "the name is not UTF-8 text", "rename the file or folder"
        else:
            problem = f"your locale ({error.encoding}) cannot encode this text"
            hint = "set LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        return UsageError(f"{text!r}: {problem}", hint=hint)
    if not isinstance(error, SsdctlError) and (full := memory_error(error)) is not None:
        return full
    if (refusal := refusal_of_disk(error)) is not None:
        if written and not error.filename:
            return disk_error(error, written, "writing")
        return refusal
    return library_error(error)


def _interrupt(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that is the cause: Python 3.11 wraps what ends a class's creation."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error


def _usage_error(error: Any) -> UsageError:
    context = getattr(error, "ctx", None)
    command, path = getattr(context, "command", None), getattr(context, "command_path", "ssdctl")
    text, hint = error.format_message().rstrip("."), f"`{path} --help` lists all options"
    text = text.replace("Value error, ", "")
    flag, parameter = getattr(error, "option_name", ""), getattr(error, "param", None)
    if text.startswith("No such command"):
        text, _, near = text.partition(". Did you mean ")
        meant = other_programs()["commands"].get(text.split("'")[1])
        near = near or (f"{meant!r}?" if meant else "")
        hint = f"did you mean {near}" if near else f"`{path} --help` lists the commands"
    elif text.startswith("Missing argument"):
        hint = f"usage: {usage(error.ctx.command, error.ctx)}"
    elif isinstance(command, AliasCommand) and text.startswith("No such option"):
        text, near = error.message, command.near_option(flag)
        hint = f"did you mean {near}?" if near else hint
    elif isinstance(command, AliasCommand) and text.startswith("Got unexpected"):
        folders = [option for option in ("--data", "--dest") if option in command.templates]
        hint = f"did you mean {folders[0]}?" if folders else hint
    elif flag or parameter is not None:  # without its value, or missing
        parameters: list[Any] = getattr(command, "params", [])
        found = [p for p in parameters if p is parameter or flag in p.opts]
        hint = described(found[0]) if found else hint
    return UsageError(text[0].lower() + text[1:], hint=hint)


def _call(
    console: Console,
    settings: Sequence[Setting],
    typed: dict[str, str],
    values: dict[str, Any],
    is_isolated: bool,
) -> Call:
    file = _given_once(values.pop("config_file"))
    assignments = values.pop("assignments") or []
    overrides: list[Override] = []
    launched = values.get("rest")  # another command than train
    for setting in settings:
        for flag, parameter, constant in _options(setting):
            value = values.pop(parameter)
            if isinstance(value, list):
                value = ",".join(value if setting.is_joined else value[-1:]) if value else None
            if value is None or (value is False and constant is not None):
                continue
            if setting.is_flag and value is False:
                flag = setting.flags[1]
            flag = typed.get(flag, flag)
            if constant and overrides and overrides[-1].path == setting.path:
                raise UsageError(f"{overrides[-1].source} and {flag}: give one of them")
            overrides.append(Override(setting.path, constant or value, of_call(flag)))
    is_isolated = is_isolated or _is_isolated.get()
    config = resolve(
        file=file,
        overrides=[*parse_assignments(assignments, typed), *overrides],
        environment={} if is_isolated else None,
        default_file=not is_isolated,
        used={s.path for s in settings if not (launched and s.path.startswith(OF_TRAINING))},
    )
    return Call(config, console, file, assignments, overrides)


def _options(setting: Setting) -> list[tuple[str, str, str | None]]:
    """Return the options of a setting: (flag, parameter name, constant that the flag sets)."""
    base = setting.path.replace(".", "__")
    if setting.choice_flags:
        return [(f, base + "__" + f.strip("-"), f.strip("-")) for f in setting.flags]
    return [(setting.flags[0], base, None)]


def _parameters(setting: Setting, *, is_hidden: bool) -> Iterator[inspect.Parameter]:
    joined = "|".join(setting.choices)
    is_long = len(joined) > LONGEST_METAVAR
    choices = f": {', '.join(setting.choices)}" if is_long else ""
    for flag, name, constant in _options(setting):
        problem = functools.partial(problem_of, setting.path)
        complete = completer(setting.choices, parts=setting.parts, problem_of=problem)
        option = typer.Option(
            "/".join(setting.flags) if setting.is_flag else flag,
            help=setting.help + choices + _default_note(setting),
            metavar="NAME" if is_long else joined or setting.metavar,
            rich_help_panel=setting.panel,
            hidden=is_hidden and not is_completion(),
            autocompletion=None if constant else complete,
        )
        if constant:
            yield _parameter(name, bool, option, default=False)
        else:
            kind: Any = bool if setting.is_flag else list[str] if setting.is_list else str
            yield _parameter(name, kind | None, option)


def _common_parameters() -> list[inspect.Parameter]:
    option = functools.partial(typer.Option, rich_help_panel=COMMON)
    config = option(
        "--config", help="Config file [default: ./ssdctl.toml if it exists]", metavar="FILE"
    )
    assign = option("--set", help="Set any setting by its key", metavar="KEY=VALUE")
    quiet = option("-q", "--quiet", help="Print only the result, warnings and errors")
    verbose = option("-v", "--verbose", help="Print details, and tracebacks of errors")
    short = option(
        "-h",
        help="Show the most important options; --help shows all",
        is_eager=True,
        callback=show_short_help,
    )
    return [
        _parameter("config_file", list[str] | None, config),
        _parameter("assignments", list[str] | None, assign),
        _parameter("as_json", bool, option("--json", help="Print the result as JSON"), False),
        _parameter("quiet", bool, quiet, False),
        _parameter("verbose", bool, verbose, False),
        _parameter("short_help", bool, short, False),
    ]


def _given_once(files: list[str] | None) -> str | None:
    if files and len(files) > 1:
        raise UsageError(f"--config is given {len(files)} times", hint="give one file")
    return files[0] if files else None


def _parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _default_note(setting: Setting) -> str:
    if "[default" in setting.help:
        return ""
    value, label = setting.default, "default"
    if setting.is_recipe:
        label = str(all_settings()["train.preset"].default)
        value = _preset_values(label)[setting.path]
        if setting.path in FITTED:
            return f" [{plain_value(value)} on COCO; fitted below 2,500 images]"
    elif value is None or value is False or value == ():
        return ""
    return f" [{label}: {plain_value(value)}]"


@functools.cache
def _preset_values(name: str) -> dict[str, Any]:
    return {override.path: override.value for override in preset_overrides(name)}
