"""Accept other spellings of options, and handle options of other programs.

A command line may use standard spellings (`--batch-size`, `--learning-rate`, `--num_workers`) and
old flags that mean the same: `AliasCommand` rewrites them before they are parsed, so help and
completion list each option once. An old flag with another meaning, or without a counterpart, is
refused with its replacement or the reason (exit 2).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssdctl.cli.help import HelpCommand
from ssdctl.config.fields import COUNTED_DEVICES
from ssdctl.config.settings import Setting, all_settings, other_programs, select
from ssdctl.errors import UsageError

# Aliases of options that are not settings: the first target that the command has.
OUTPUT = ("--out", "--dest")
COMMAND_ALIASES = {"--output-dir": OUTPUT, "--output": OUTPUT, "--out": OUTPUT, "--dest": OUTPUT}
# Options that an alias sets in addition to its own: TensorFlow's summaries are TensorBoard events.
IMPLIED = {"--save-summary-steps": "--tensorboard"}
POSITIONAL = "="
PRECISIONS = ("bf16", "fp16", "fp32")
CHECKPOINT_METAVAR = "CKPT"  # commands with this first argument also accept it as an option
CHECKPOINT_ALIASES = ("--checkpoint", "--weights", "--model-dir")


@functools.cache
def refused_options() -> dict[str, dict[str, Any]]:
    """Return the tables of other_programs.toml: `settings` (by path), `other`,
    `launch_does` and `not_needed`."""
    count = ", ".join(f"{device.count_option} N" for device in COUNTED_DEVICES)
    other = {flag: text.format(count=count) for flag, text in other_programs()["other"].items()}
    return {**other_programs(), "other": other}


class AliasCommand(HelpCommand):
    settings: Sequence[Setting] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # a shell's completion has the words so far
            args = self.without_aliases(args)
        return super().parse_args(ctx, args)

    def without_aliases(self, args: Sequence[str]) -> list[str]:
        """Return the command line with every alias replaced by the option that it stands for."""
        options: list[Any] = [p for p in self.params if p.param_type_name == "option"]
        own = {flag: p for p in options for flag in (*p.opts, *p.secondary_opts)}
        templates = self._templates(own)
        checkpoints: list[str] = []
        rewritten: list[str] = []
        rest = list(args)
        while rest:
            token = rest.pop(0)
            if token == "--":
                rewritten += [token, *rest]
                break
            flag, equals, value = _split(token, templates)
            self._refuse_other_meaning(flag, value if equals else rest[0] if rest else "")
            template, typed = templates.get(flag), token.partition("=")[0]
            if template is None:
                _refuse_removed(flag, typed, self.settings)
                rewritten.append(token)
            elif not template.endswith("="):
                if equals:
                    raise UsageError(f"{typed} does not take a value")
                rewritten.append(template)
            elif equals or rest:
                value = value if equals else rest.pop(0)
                if flag == "-d" and value in PRECISIONS:
                    raise UsageError(f"-d is the dataset folder in ssdctl: use --{value}")
                if template == POSITIONAL:
                    checkpoints.append(value)
                else:
                    rewritten.append(template + value)
            elif flag in own:
                rewritten.append(token)
                break  # it is refused when it is parsed
            else:
                raise UsageError(f"{typed} requires a value")
            if not token or (template is not None and template.endswith("=") and not value):
                raise UsageError(
                    f"{typed or 'an argument'} is empty: give a value, or leave it out (in a "
                    "script, perhaps a variable is not set)"
                )
            if IMPLIED.get(flag) in own:
                rewritten.append(IMPLIED[flag])
        return [*checkpoints, *rewritten]

    def _refuse_other_meaning(self, flag: str, value: str) -> None:
        """Raise UsageError if the value shows that an option is meant as in another program."""
        own = {flag for setting in self.settings for flag in setting.flags}
        number = re.fullmatch(r"-v=?(\d+)", flag + value if flag == "-v" else flag)
        if number and "--log-every" in own:
            raise UsageError(
                f"-v is --verbose in ssdctl and takes no value: use --log-every {number[1]} for "
                "the -v of Habana's TensorFlow program"
            )
        if flag == "--profile" and flag in own and value.isdecimal():
            raise UsageError(
                f"--profile {value}: use --profile 50,53, the first and the last step to profile; "
                "the trace is a file in RUN/profile, so a port is not needed"
            )

    def _templates(self, own: Mapping[str, Any]) -> dict[str, str]:
        """Return what each option and alias stands for: `--flag`, or `--flag=` with a value."""
        templates = {flag: flag if p.is_flag else f"{flag}=" for flag, p in own.items()}
        for setting in self.settings:
            refused = refused_options()["settings"].get(setting.path, {})
            for alias in setting.aliases:
                if alias not in refused:
                    templates.setdefault(*_template(setting, alias))
        if any(setting.path == "train.epochs" for setting in self.settings):
            for setting in select("evaluate.*"):  # training runs evaluations
                for alias in setting.aliases:
                    templates.setdefault(alias, f"--set={setting.path}=")
        for name, targets in COMMAND_ALIASES.items():
            if target := next((t for t in targets if t in own), None):
                templates.setdefault(name, f"{target}=")
        arguments = [p for p in self.params if p.param_type_name == "argument"]
        if arguments and CHECKPOINT_METAVAR in str(arguments[0].metavar):
            for name in CHECKPOINT_ALIASES:
                templates.setdefault(name, POSITIONAL)
        return templates


def _template(setting: Setting, alias: str) -> tuple[str, str]:
    """Return an alias without its constant, and what it stands for."""
    name, _, constant = alias.partition("=")
    if setting.is_flag:
        return name, setting.flags[constant == "false"]
    if setting.choice_flags:
        return name, f"--{constant}" if constant else f"--set={setting.path}="
    return name, f"{setting.flags[0]}={constant}" if constant else f"{setting.flags[0]}="


def _split(token: str, templates: Mapping[str, str]) -> tuple[str, str, str]:
    """Split `--flag=value` and `-b128` into flag, `=` and value; `--batch_size` gets dashes."""
    if token.startswith("--"):
        flag, equals, value = token.partition("=")
        return flag.replace("_", "-"), equals, value
    short, value = token[:2], token[2:]
    if value and templates.get(short, "").endswith("=") and token not in refused_options()["other"]:
        return short, "=", value.removeprefix("=")
    return token, "", ""


def _refuse_removed(flag: str, typed: str, settings: Sequence[Setting]) -> None:
    """Raise UsageError with the replacement if `flag` (with dashes) is another program's."""
    flag = flag.partition("=")[0]
    refused = refused_options()
    for path, flags in refused["settings"].items():
        if flag in flags:
            setting = all_settings()[path]
            where = "" if setting in settings else f" (an option of ssdctl {setting.section})"
            raise UsageError(f"{typed} is not an option of ssdctl: use {flags[flag]}{where}")
    if flag in refused["launch_does"] and any(s.section == "launch" for s in settings):
        reason = refused["launch_does"][flag]
        raise UsageError(f"{typed} is not needed: {reason}", hint="leave it out")
    if flag in refused["other"]:
        raise UsageError(f"{typed} is not an option of ssdctl: use {refused['other'][flag]}")
    if flag in refused["not_needed"]:
        reason = refused["not_needed"][flag]
        raise UsageError(f"{typed} is not an option of ssdctl and not needed: {reason}")
