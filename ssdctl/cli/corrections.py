"""Refuse options of other programs and of `ssdctl launch`: one error with the corrected line.

    error: 2 options are not those of ssdctl train:
      --amp: use --bf16 (or --fp16, the type of NVIDIA's --amp, on GPUs only)
      --nproc-per-node: use ssdctl launch --gpus 8 (with the number of devices)
    corrected:
      ssdctl launch --gpus 8 --data /coco --bf16

The rows of ssdctl/config/other_programs.toml name each refused option and its replacement.
option_aliases.py reads a command line as words, each with its row. `_CorrectedLine` puts each word,
or its replacement, behind `ssdctl launch` or behind the command.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ssdctl.cli.help import click_root
from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.config.resolve import preset_overrides
from ssdctl.config.settings import Setting, all_settings, other_programs
from ssdctl.errors import UsageError
from ssdctl.runtime.hardware import find_hardware

COUNTS = {device.count_option for device in DEVICE_TYPES.values()}
TRAINING = ("train", "launch", "benchmark train")  # commands that take --preset
NODES, PER_NODE = ("--nodes", "--nnodes", "--num-nodes"), "--nproc-per-node"
DEFAULT_COUNT = 8  # devices of a node, if this machine has none
COUNTED = "the devices are counted already; a chip of TPU v2 or v3 has two cores"
THEIR_BATCH_SIZE = 32  # the default of the program with --batch-splits
# Shown for the fields of a row if the option has no value.
EXAMPLES = {"{,}": "E,E", "{+}": "E,E", "{k}": "15,55", "{chips}": "N", "{device}": "--gpus"}


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

    @property
    def command(self) -> str:
        """The command that replaces the option; empty if an option does."""
        words = self.instead.split()
        names = [word for word in words if word[0] not in "-{|"]
        return " ".join(names) if words and words[0] in names else ""


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


class Word(NamedTuple):
    """An argument, or an option with its values."""

    typed: tuple[str, ...]
    flag: str = ""  # with dashes instead of underscores; empty: an argument
    values: tuple[str, ...] = ()
    row: Row | None = None  # why it is refused
    is_launchs: bool = False  # an option that only `ssdctl launch` has

    @property
    def name(self) -> str:
        """The option as typed, without its value."""
        is_short = len(self.flag) == 2  # `-b128`
        return self.flag if is_short else self.typed[0].partition("=")[0]


class CommandWithAliases(Protocol):
    """The interface of `AliasCommand` for the corrections."""

    settings: Sequence[Setting]

    @property
    def templates(self) -> dict[str, str]: ...

    @property
    def takes_arguments(self) -> bool: ...

    def read_words(self, args: Sequence[str]) -> list[Word]: ...


def refuse(name: str, command: CommandWithAliases, words: Sequence[Word]) -> None:
    """Raise UsageError with the corrected line if a command does not have some of the options.

    Args:
        name: The command: `train`, `benchmark train`.
    """
    line = _CorrectedLine(name, command, words)
    if texts := list(dict.fromkeys(line.refusals)):
        problem = f"{len(texts)} options are not those of ssdctl {name}:"
        problem = "\n  ".join([problem, *texts]) if len(texts) > 1 else texts[0]
        raise UsageError(problem, command=shlex.join(["ssdctl", *line.tokens()]))


class _CorrectedLine:
    """The words of a corrected command line, and the reasons for the corrections.

    Attributes:
        target: The command that the line runs: the typed one, unless an option stands for another.
        given: The values of the accepted options, by setting.
        launch: The words of `ssdctl launch`, which starts the target; empty: it is not launched.
        options: The words of the target.
        refusals: One line for each refused option.
    """

    def __init__(self, name: str, command: CommandWithAliases, words: Sequence[Word]) -> None:
        self.name, self.program = name, _program(words)
        self.launch, self.options, self.refusals = list[str](), list[str](), list[str]()
        commands = [word.row.command for word in words if word.row]
        self.target = next((c for c in commands if c not in ("", "launch")), name)
        self.is_moved = self.target != name
        self.command = command_of(self.target) if self.is_moved else command
        self.templates = self.command.templates
        self.given = dict(self._setting_and_value(w) for w in words if w.flag and not w.row)
        self.is_launched = "launch" in (name, *commands) or any(w.is_launchs for w in words)
        self.nodes = next((_count(w) for w in words if w.flag in NODES and w.values), 0) or 1
        self.splits = next((_count(w) for w in words if w.row and w.flag == "--batch-splits"), 0)
        for word in words:
            self._place(word)
        is_training = self.target in TRAINING and "--" not in self.options
        if self.refusals and self.program and is_training and "train.preset" not in self.given:
            self.options[:0] = ["--preset", self.program]

    def tokens(self) -> list[str]:
        """Return the words after `ssdctl`."""
        if self.launch and not self._has_count(self.launch):
            hardware, option = find_hardware(), self._count_option()
            number = hardware.num_gaudi if option == "--hpus" else hardware.num_nvidia
            self.launch[:0] = [option, str((number or DEFAULT_COUNT) * self.nodes)]
        if not self.launch or self.target == "launch":
            return [*self.target.split(), *self.launch, *self.options]
        rest = [] if self.target == "train" else ["--", *self.target.split()]
        return ["launch", *self.launch, *rest, *self.options]

    def _place(self, word: Word) -> None:
        is_targets = self._is_option_of_target(word)
        setting, (value, *_) = self._setting(word.flag), (*word.values, "")
        if word.row is not None and not is_targets:
            self._replace(word, word.row)
        elif word.is_launchs:
            self.launch += word.typed
            self._refuse(word, ["ssdctl", "launch", *word.typed], "")
        elif word.typed[0] == "--" and self.target == "launch":
            self._place_launched(*word.typed[1:])
        elif self.is_moved and word.flag and not is_targets:
            self._refuse(word, [], f"ssdctl {self.target} does not have it")
        elif self.is_moved and not word.flag and not self.command.takes_arguments:
            self._refuse(word, [], f"ssdctl {self.target} takes only options")
        elif setting == "train.warmup" and (remark := self._why_steps(value)):
            self._replace_by(word, ["--warmup", f"{value}st"], remark)
        elif setting == "train.device" and value and self.is_launched and self.target != "launch":
            self._refuse(word, [], "ssdctl launch chooses the device")
        elif setting == "train.batch_size" and self.splits and value.isdecimal():
            self.options += ["--bs", str(max(int(value) // self.splits, 1))]
        else:
            self.options += word.typed

    def _place_launched(self, *rest: str) -> None:
        self.options.append("--")
        try:
            command = command_of(rest[0])
            words = command.read_words(rest[1:])
        except (IndexError, KeyError, AttributeError, UsageError):  # refused when it is parsed
            self.options += rest
            return
        line = _CorrectedLine(rest[0], command, words)
        self.refusals += line.refusals
        self.launch += line.launch
        self.options += [*line.target.split(), *line.options]

    def _is_option_of_target(self, word: Word) -> bool:
        """Return whether another command, to which the line moves, accepts the option."""
        value = (*word.values, "")[0]
        is_refused = word.row is not None and word.row.applies_to(value, is_own=True)
        return self.is_moved and word.flag in self.templates and not is_refused

    def _replace(self, word: Word, row: Row) -> None:
        choices = [self._filled(text.split(), word, row) for text in row.instead.split("|")]
        instead = next((c for c in choices if not c or c[0] in self.templates), choices[-1])
        if row.command == "launch":
            if self._has_count(self.launch) and COUNTS & {*instead}:
                self._refuse(word, [], COUNTED)
                return
            self.launch += instead[1:] if _has_values(word, row) else []
            self._refuse(word, ["ssdctl", *instead], row.remark)
        elif row.command == self.name:
            self._refuse(word, [], row.remark)
        elif row.command:
            self.options += instead[len(row.command.split()) :]
            self._refuse(word, ["ssdctl", *instead], row.remark)
        else:
            self._replace_by(word, instead if _has_values(word, row) else [], row.remark, instead)

    def _replace_by(
        self, word: Word, words: Sequence[str], remark: str, shown: Sequence[str] = ()
    ) -> None:
        """Add options in place of a word, unless the target lacks them or they are given.

        Args:
            shown: The options in the message, if there are no `words`.
        """
        setting = self._setting(words[0]) if words else ""
        is_known = not words or words[0] in self.templates or words[0][0] != "-"
        if setting == "train.device" and self.is_launched:
            words = shown = ()
        elif words and is_known and (word.row is None or setting not in self.given):
            self.given[setting] = tuple(words[1:])
            self.options += words
            if setting == "train.accumulate" and "train.batch_size" not in self.given:
                self.options += ["--bs", str(max(THEIR_BATCH_SIZE // max(self.splits, 1), 1))]
        if not is_known:
            remark = f"an option of ssdctl train{'; ' * bool(remark)}{remark}"
        self._refuse(word, words or shown, remark)

    def _refuse(self, word: Word, instead: Sequence[str], remark: str) -> None:
        use = f"use {' '.join(instead)}" if instead else "leave it out"
        self.refusals.append(f"{word.name}: {use}{f' ({remark})' if remark else ''}")

    def _filled(self, words: Sequence[str], word: Word, row: Row) -> list[str]:
        """Return the words of a row with the values of the option in their fields."""
        fields = {**EXAMPLES, "{}": row.metavar.rstrip("."), "{devices}": "N"}
        if word.values and _has_values(word, row):
            values, number = word.values, _number(word.values[0])
            fields = {
                "{}": values[0],
                "{,}": ",".join(values),
                "{+}": ",".join(f"{_number(value) + 1:g}" for value in values),
                "{device}": self._count_option(),
                "{devices}": f"{number * (self.nodes if word.flag == PER_NODE else 1):g}",
                "{chips}": f"{max(number + 1, 2) // 2:.0f}",
                "{k}": f"{15 + 1.5 * number:g},{55 + 5.5 * number:g}",
            }
        filled = []
        for text in " ".join(words).replace("{count}", "{device} {devices}").split():
            for field, value in fields.items():
                text = text.replace(field, value)
            filled.append(text)
        return filled

    def _why_steps(self, value: str) -> str:
        """Return why a warm-up without a unit counts steps; empty if it may count epochs.

        As epochs it would end after the first decay of the learning rate.
        """
        if not value.isdecimal():
            return ""
        name = (*self.given.get("train.preset", ()), self.program)[0]
        preset = all_settings()["train.preset"]
        recipe = preset_overrides(name if name in preset.choices else preset.default)
        given = {key: ",".join(values).split(",")[0] for key, values in self.given.items()}
        ends = {override.path: override.value for override in recipe}
        ends["train.decay_epochs"] = ends["train.decay_epochs"][0]
        decay, last = (_number((ends | given)[f"train.{n}"]) for n in ("decay_epochs", "epochs"))
        if int(value) <= min(decay, last):
            return ""
        is_possible = f"; {value} epochs, --warmup {value}ep, end after a decay"
        return "iterations, as in NVIDIA's program" + is_possible * (int(value) <= last)

    def _has_count(self, words: Sequence[str]) -> bool:
        """Return whether the number of devices is given, in these words or by an option."""
        return bool(COUNTS & {*words, *self.given})

    def _count_option(self) -> str:
        """Return the counting option for the given device, the program, or this machine."""
        (device,) = self.given.get("train.device", ("auto",))
        if device in DEVICE_TYPES:
            return DEVICE_TYPES[device].count_option
        if self.program:
            return str(other_programs()["programs"][self.program]["count"])
        return "--hpus" if find_hardware().num_gaudi else "--gpus"

    def _setting(self, flag: str) -> str:
        """Return the setting that an option of the target sets, else the option itself."""
        option, _, value = self.templates.get(flag, flag).partition("=")
        if option == "--set":
            return value.partition("=")[0]
        return next((s.path for s in self.command.settings if option in s.flags), option)

    def _setting_and_value(self, word: Word) -> tuple[str, tuple[str, ...]]:
        constant = self.templates.get(word.flag, "").partition("=")[2]  # of `--hpu=hpu`
        return self._setting(word.flag), word.values or ((constant,) if constant else ())


def _has_values(word: Word, row: Row) -> bool:
    is_number = row.metavar in ("N", "E...")
    values = word.values or (() if row.metavar else ("",))
    return bool(values) and all(_number(value) >= 0 for value in values if is_number)


def _number(value: object) -> float:
    """Return a finite number of at least 0; -1 for everything else."""
    try:
        number = float(str(value))
    except ValueError:
        return -1
    return number if 0 <= number < 1e9 else -1


def _count(word: Word) -> int:
    value = (*word.values, "")[0]
    return int(value) if value.isdecimal() else 0


def _program(words: Sequence[Word]) -> str:
    """Return the preset of the only program that has all foreign options; empty if unknown."""
    programs = {name: {*p["options"]} for name, p in other_programs()["programs"].items()}
    known = {word.flag for word in words} & set[str]().union(*programs.values())
    names = [name for name, options in programs.items() if known and known <= options]
    return names[0] if len(names) == 1 else ""


def command_of(name: str) -> CommandWithAliases:
    """Return a command: `train`, `benchmark train`."""
    command: Any = click_root(name.split()[0])
    for part in name.split():
        command = command.commands[part]
    command.read_words  # noqa: B018 - a group has none
    found: CommandWithAliases = command
    return found
