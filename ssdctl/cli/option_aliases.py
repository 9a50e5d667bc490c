"""Accept other spellings of options: `--batch-size`, `--learning-rate`, `--num_workers`.

`AliasCommand` replaces them by ssdctl's own options before typer parses the line, so help and
completion list each option once. Options of other programs that mean something else are refused
in one message; ssdctl/config/other_programs.toml names each of them and its replacement.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ssdctl.cli.help import HelpCommand, click_root
from ssdctl.config.settings import Setting, other_programs, select
from ssdctl.errors import UsageError

# Aliases of options that are not settings: the first target that the command has.
OUTPUT = ("--out", "--dest")
OUTPUT_ALIASES = ("--output-dir", "--output", "--out", "--dest")
COMMAND_ALIASES = {"--format": ("--to",)} | dict.fromkeys(OUTPUT_ALIASES, OUTPUT)
SHARED = {*COMMAND_ALIASES, "--dry-run", "--seed"}  # several commands have them
JOB_TABLES = ("slurm", "kubernetes")
MIN_SIMILARITY = 0.75  # of the letters of two options
# Options that an alias sets in addition to its own: TensorFlow's summaries are TensorBoard events.
IMPLIED = {"--save-summary-steps": "--tensorboard"}
POSITIONAL = "="  # template of an option whose value becomes the first argument
# Options that are accepted for the first argument of a command, by its metavar.
ARGUMENT_ALIASES = {
    "CKPT": ("--checkpoint", "--weights", "--model-dir", "--model"),
    "DATASET": ("--data", "--data-dir", "--dataset"),
}


# Of evaluations, which training runs: of their other options, other meanings are likelier.
DETECTION = ("evaluate.score_threshold", "evaluate.nms_iou")


class AliasCommand(HelpCommand):
    settings: Sequence[Setting] = ()
    # The option that was typed for each one that replaces it: `--batch_size` for `--bs`.
    typed: dict[str, str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # a shell's completion has the words so far
            self.typed.clear()
            args = self.without_aliases(args, ctx.command_path.partition(" ")[2])
        try:
            return super().parse_args(ctx, args)
        except Exception as raised:
            error: Any = raised
            if getattr(error, "ctx", ctx) is None:  # of an option without its value
                error.ctx = ctx
            raise

    def without_aliases(self, args: Sequence[str], name: str = "train") -> list[str]:
        """Return the command line with every alias replaced by ssdctl's option."""
        words, templates = self.read_words(args), self.templates
        refuse(name, words)
        checkpoints, rewritten = list[str](), list[str]()
        for word in words:
            template = templates.get(word.flag, "")
            if template == POSITIONAL:
                checkpoints += word.values
            elif template.endswith("=") and word.values:
                option = self._choice_flag(template, word.values[0]) or template + word.values[0]
                rewritten.append(option)
                is_set = option.startswith("--set=")
                self.typed[option if is_set else option.partition("=")[0]] = word.name
            elif template and not template.endswith("="):
                rewritten.append(template)
                self.typed[template.partition("=")[0]] = word.name
            else:
                rewritten += word.typed
            if IMPLIED.get(word.flag) in templates:
                rewritten.append(IMPLIED[word.flag])
        return [*checkpoints, *rewritten]

    def _choice_flag(self, template: str, value: str) -> str:
        """Return `--bf16` for `--dtype bf16`, so that both are refused together; else nothing."""
        return next(
            (
                f"--{value}"
                for setting in self.settings
                if template == f"--set={setting.path}=" and f"--{value}" in setting.flags
            ),
            "",
        )

    def read_words(self, args: Sequence[str]) -> list[Word]:
        """Return the arguments, and the options with their values.

        Raises:
            UsageError: An option lacks its value, or does not take one; or a word is empty.
        """
        templates, rest, words = self.templates, list(args), list[Word]()
        while rest:
            token = rest.pop(0)
            if is_local_rank(token):
                check_local_rank()
                continue
            if token == "--":
                words.append(Word((token, *rest)))
                break
            flag, equals, value = _split(token, templates)
            following = value if equals else (rest or [""])[0]
            row = find_row(flag, following, is_own=flag in templates)
            if row is None and flag not in templates:
                row = self._row_of_other_command(flag)
            if row is not None:
                values = (value,) if equals else row.take_values(rest)
                words.append(Word((token,), flag, values, row))
            elif flag in templates:
                words.append(_read_option(token, flag, templates[flag], (equals, value), rest))
            else:
                words.append(Word((token,), flag if token[:1] == "-" else ""))
                if not token:
                    raise _empty("an argument")
        return words

    def _row_of_other_command(self, flag: str) -> Row | None:
        """Return what to write for an option of another command, or a key of a job's table."""
        if not flag.startswith("--") or flag in SHARED:
            return None
        names = ("train", "launch", "prepare")  # launch has all options of train
        for name in names:
            command: Any = click_root(name).commands[name]
            template = command.templates.get(flag)
            if command is self or template is None:
                continue
            if template.partition("=")[0] in self.templates:
                return None
            option = flag + " {}" * template.endswith("=")
            if self.name not in names:  # such as of a script that trained and evaluated
                return Row("V" * template.endswith("="), "", "", f"ssdctl {name} has it")
            return _row_of(name, option)
        tables = JOB_TABLES if self.name == "launch" else ()
        keys = [setting.path for table in tables for setting in select(f"{table}.*")]
        key = next((key for key in keys if f"--{_dashed(key.partition('.')[2])}" == flag), None)
        return None if key is None else _row_of("launch", f"--set {key}={{}}")

    def near_option(self, flag: str) -> str:
        """Return the option that a mistyped one resembles, if there is one."""
        names = {name.lstrip("-"): template for name, template in self.templates.items()}
        typed = flag.lstrip("-")
        near = difflib.get_close_matches(typed, names, n=1, cutoff=MIN_SIMILARITY)
        near += [name for name in names if len(typed) > 2 and name.startswith(typed)]
        if not near:
            return ""
        template = names[near[0]]
        if template == POSITIONAL:
            return f"--{near[0]}"
        if template.startswith("--set="):
            return template.replace("=", " ", 1) + "VALUE"
        return template.partition("=")[0]

    @functools.cached_property
    def templates(self) -> dict[str, str]:
        """The replacement of each option and alias: `--flag`, or `--flag=` to add the value to."""
        options: list[Any] = [p for p in self.params if p.param_type_name == "option"]
        own = {flag: p for p in options for flag in (*p.opts, *p.secondary_opts)}
        templates = {flag: flag if p.is_flag else f"{flag}=" for flag, p in own.items()}
        for setting in self.settings:
            for alias in setting.aliases:
                if find_row(alias, "", is_own=False) is None:
                    templates.setdefault(*_template(setting, alias))
        if any(setting.path == "train.epochs" for setting in self.settings):
            for setting in select("evaluate.*"):  # training runs evaluations
                names = setting.flags if setting.path in DETECTION else ()
                for alias in (*setting.aliases, *names):
                    templates.setdefault(alias, f"--set={setting.path}=")
        outputs = ("--store",) if self.name == "prepare" else ()  # elsewhere it is read
        for name, targets in COMMAND_ALIASES.items():
            others = outputs if name in OUTPUT_ALIASES else ()
            if target := next((t for t in (*targets, *others) if t in own), None):
                templates.setdefault(name, f"{target}=")
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        for metavar, names in ARGUMENT_ALIASES.items():
            if arguments and metavar in re.split(r"\W", str(arguments[0].metavar)):
                templates |= {name: POSITIONAL for name in names if name not in templates}
        return templates


def is_local_rank(word: str) -> bool:
    return word.replace("_", "-").startswith("--local-rank=")


def check_local_rank() -> None:
    """Check that a launcher gave `--local-rank=N`, which its variables repeat.

    `python -m torch.distributed.launch -m ssdctl train` puts it before the command.
    """
    if not {"RANK", "LOCAL_RANK"} & {*os.environ}:
        raise UsageError(
            "--local-rank: launchers set it in the environment of each rank, as LOCAL_RANK",
            hint="leave it out; ssdctl launch starts several ranks",
        )


def _template(setting: Setting, alias: str) -> tuple[str, str]:
    """Return the name of an alias, `--hpu` of `--hpu=hpu`, and its template."""
    name, _, constant = alias.partition("=")
    if setting.is_flag:
        return name, setting.flags[constant == "false"]
    if setting.choice_flags:
        return name, f"--{constant}" if constant else f"--set={setting.path}="
    return name, f"{setting.flags[0]}={constant}" if constant else f"{setting.flags[0]}="


def _dashed(key: str) -> str:
    return key.replace("_", "-")


def _split(token: str, templates: Mapping[str, str]) -> tuple[str, str, str]:
    """Split `--flag=value` and `-b128` into flag, `=` and value; `--batch_size` gets dashes."""
    if token.startswith("--"):
        flag, equals, value = token.partition("=")
        return _dashed(flag), equals, value
    short, value = token[:2], token[2:].removeprefix("=")
    is_joined = templates.get(short, "").endswith("=") or find_row(short, value, is_own=True)
    if value and is_joined and token not in refused_options():
        return short, "=", value
    return token, "", ""


def _read_option(
    token: str, flag: str, template: str, joined: tuple[str, str], rest: list[str]
) -> Word:
    typed, (equals, value) = token.partition("=")[0], joined
    if not template.endswith("="):
        if equals:
            raise UsageError(f"{typed} does not take a value")
        return Word((token,), flag)
    if not equals and not rest:
        if template == f"{flag}=":
            return Word((token,), flag)  # refused when it is parsed
        raise UsageError(f"{typed} requires a value")
    value = value if equals else rest.pop(0)
    if not value:
        raise _empty(typed)
    return Word((token,) if equals else (token, value), flag, (value,))


def _empty(what: str) -> UsageError:
    hint = "give a value, or leave it out; in a script, a variable may not be set"
    return UsageError(f"{what} is empty", hint=hint)


class Row(NamedTuple):
    """A row of the table: an option, or one value of it, and its replacement."""

    metavar: str  # empty: takes no value; `E...`: takes any number of values
    constant: str  # the only value that the row applies to; empty: all values
    instead: str
    remark: str

    def applies_to(self, value: str, *, is_own: bool) -> bool:
        """Return whether the row refuses this value; of ssdctl's own options, only numbers."""
        if self.constant:
            return value == self.constant
        return not is_own or (self.metavar == "N" and value.isdecimal())

    def take_values(self, rest: list[str]) -> tuple[str, ...]:
        """Remove the values of the option from the words after it."""
        most = len(rest) if self.metavar.endswith("...") else bool(self.metavar or self.constant)
        number = 0
        while number < min(most, len(rest)) and not rest[number].startswith("-"):
            number += 1
        values = tuple(rest[:number])
        del rest[:number]
        return values


@functools.cache
def refused_options() -> dict[str, list[Row]]:
    """Return the rows of each refused option; rows for a single value come first."""
    rows: dict[str, list[Row]] = {}
    for usage, (instead, remark) in other_programs()["refused"].items():
        name, _, metavar = usage.partition(" ")
        flag, _, constant = name.partition("=")
        rows.setdefault(flag, []).append(Row(metavar, constant, instead, remark))
    return rows


def find_row(flag: str, value: str, *, is_own: bool) -> Row | None:
    rows = refused_options().get(flag, ())
    return next((row for row in rows if row.applies_to(value, is_own=is_own)), None)


def _row_of(command: str, option: str) -> Row:
    """Return the row of an option that another command has."""
    return Row("VALUE" if "{}" in option else "", "", f"ssdctl {command} {option}", "")


class Word(NamedTuple):
    """An argument, or an option with its values."""

    typed: tuple[str, ...]
    flag: str = ""  # with dashes instead of underscores; empty: an argument
    values: tuple[str, ...] = ()
    row: Row | None = None  # why it is refused

    @property
    def name(self) -> str:
        """The option as typed, without its value."""
        is_short = len(self.flag) == 2  # `-b128`
        return self.flag if is_short else self.typed[0].partition("=")[0]

    def refusal(self, row: Row, command: str) -> str:
        """Return what to write instead in a command, and why."""
        instead = row.instead.replace("{}", ",".join(self.values) or row.metavar.rstrip("."))
        words, own = instead.split(), ["ssdctl", *command.split()]
        if words[: len(own)] == own:  # it is given already
            instead = " ".join(words[len(own) :])
        use = f"use {instead}" if instead else "leave it out"
        return f"{self.name}: {use}{f' ({row.remark})' if row.remark else ''}"


def refuse(command: str, words: Sequence[Word]) -> None:
    """Raise UsageError if a command, such as `benchmark train`, does not have some options."""
    texts = list(dict.fromkeys(word.refusal(word.row, command) for word in words if word.row))
    if len(texts) > 1:
        problem = f"{len(texts)} options are not those of ssdctl {command}:"
        raise UsageError("\n  ".join([problem, *texts]))
    if texts:
        raise UsageError(texts[0])
