"""Refuse options of other programs and of `ssdctl launch` in one message.

    error: 2 options are not those of ssdctl train:
      --amp: use --bf16 (or --fp16, the type of NVIDIA's --amp, on GPUs only)
      --nproc-per-node: use ssdctl launch --gpus N (the number of all devices)

The rows of ssdctl/config/other_programs.toml name each refused option and its replacement.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from ssdctl.config.settings import other_programs
from ssdctl.errors import UsageError


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

    def refusal(self, row: Row) -> str:
        """Return what to write instead, and why."""
        instead = row.instead.replace("{}", ",".join(self.values) or row.metavar.rstrip("."))
        use = f"use {instead}" if instead else "leave it out"
        return f"{self.name}: {use}{f' ({row.remark})' if row.remark else ''}"


def refuse(command: str, words: Sequence[Word]) -> None:
    """Raise UsageError if a command, such as `benchmark train`, does not have some options."""
    texts = list(dict.fromkeys(word.refusal(word.row) for word in words if word.row))
    if len(texts) > 1:
        problem = f"{len(texts)} options are not those of ssdctl {command}:"
        raise UsageError("\n  ".join([problem, *texts]))
    if texts:
        raise UsageError(texts[0])
