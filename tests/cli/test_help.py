"""The help pages of all commands, and the errors of a mistyped command line."""

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from ssdctl._version import __version__
from ssdctl.cli.main import click_root


def commands(path: str = "", node: Any = None) -> Iterator[tuple[str, Any]]:
    node = node or click_root()
    for name, child in node.commands.items():
        here = f"{path} {name}".strip()
        yield from commands(here, child) if hasattr(child, "commands") else [(here, child)]


COMMANDS = dict(commands())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_has_a_purpose_examples_and_every_option(cli: Cli, command: str) -> None:
    page = cli(*command.split(), "--help").out
    assert page.index("Usage: ssdctl") < page.index("Examples:") < page.index("Common:")
    assert f"\n  ssdctl {command}" in page
    flags = set(re.findall(r"^  (?=-)(.*)$", page, re.MULTILINE))
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "argument":
            assert f"\n  {parameter.metavar}\n" in page
            is_bracketed = f" [{parameter.metavar.strip('[]')}]" in page.partition("Examples:")[0]
            assert is_bracketed != parameter.required
        elif not parameter.hidden:
            flag = parameter.opts[-1].removeprefix("--")
            value = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
            shown = rf"(--|--\[no-\]|^){flag}{re.escape(value)}(,|$)"
            assert any(re.search(shown, line) for line in flags), flag


@pytest.mark.parametrize("command", [name for name, c in COMMANDS.items() if c.short_options])
def test_short_pages_fit_a_screen(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = cli(command, "-h").out
    assert len(page.splitlines()) <= 45
    shown = set(re.findall(r"(--(?:\[no-\])?[\w-]+)", page[page.index("Options:") :]))
    options = [p for p in COMMANDS[command].params if p.param_type_name == "option"]
    named = set(COMMANDS[command].short_options)
    assert named <= {flag.replace("[no-]", "") for flag in shown}
    hidden = [p for p in options if not p.hidden and not named & {*p.opts, *p.secondary_opts}]
    assert f"\n{len(hidden)} more options: ssdctl {command} --help" in page


@pytest.mark.parametrize("command", ["", "train", "config", "config show"])
def test_help_and_version_are_commands_too(cli: Cli, command: str) -> None:
    assert cli("help", *command.split()) == cli(*command.split(), "--help")
    assert cli("version") == cli("--version")


def test_version_names_what_a_bug_report_needs(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.err) == (0, "")
    first, *rows = result.out.splitlines()
    assert first == f"ssdctl {__version__}"
    found = dict(row.split(maxsplit=1) for row in rows)
    assert set(found) - {"commit"} == {"Python", "torch", "device"}
    assert ("commit" in found) == (Path(__file__).parents[2] / ".git").exists()
    assert found["torch"] == metadata.version("torch")
