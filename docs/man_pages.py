"""Man pages of all commands, from their help; hatch_build.py adds them to the wheel."""

from __future__ import annotations

from typing import Any

from ssdctl._version import __version__
from ssdctl.cli.help import EXAMPLES
from ssdctl.cli.main import click_root
from ssdctl.errors import ExitCode

ENVIRONMENT = {
    "SSDCTL_SECTION__KEY": "any setting, for example SSDCTL_TRAIN__BATCH_SIZE=64; "
    "`ssdctl config show` lists all keys. It overrides config files; the command line overrides "
    "it.",
    "NO_COLOR": "no colors on a terminal",
    "TORCH_HOME": "parent folder of the backbone weights",
}
FILES = {
    "ssdctl.toml": "settings, read from the working directory; `ssdctl config init` writes one",
    "runs/DATASET-BACKBONE": "the default run folder",
}


def pages() -> dict[str, str]:
    """Return every page by the name of its file."""
    result = {}
    pending: list[tuple[str, Any]] = [("ssdctl", click_root())]
    while pending:
        path, command = pending.pop()
        result[path.replace(" ", "-") + ".1"] = _page(path, command)
        children = getattr(command, "commands", {})
        pending += [(f"{path} {name}", child) for name, child in children.items()]
    return result


def _page(path: str, command: Any) -> str:
    name = path.replace(" ", "-")
    text, _, examples = (command.help or "").partition(EXAMPLES)
    summary, _, more = text.partition("\n")
    lines = [
        f'.TH {name.upper()} 1 "" "ssdctl {__version__}" "ssdctl manual"',
        ".SH NAME",
        f"{_roff(name)} \\- {_roff(summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(path)}",
        _roff(_usage(command)),
        ".SH DESCRIPTION",
        *_paragraphs(f"{summary}\n{more}"),
    ]
    if children := getattr(command, "commands", None):
        lines.append(".SH COMMANDS")
        for child_name, child in children.items():
            first = (child.help or "").partition("\n")[0]
            lines += [".TP", f".BR {_roff(f'{name}-{child_name}')} (1)", _roff(first)]
    lines += _options(command)
    if explained_by := getattr(command, "takes_options_of", ""):
        lines += [
            ".PP",
            "All options of",
            f".BR {_roff(f'ssdctl-{explained_by}')} (1)",
            "work, too.",
        ]
    if examples:
        commands = [line.removeprefix("$ ") for line in examples.splitlines()]
        lines += [".SH EXAMPLES", ".nf", *map(_roff, commands), ".fi"]
    if name == "ssdctl":
        lines += _definitions("EXIT STATUS", {str(code): code.meaning for code in ExitCode})
        lines += _definitions("ENVIRONMENT", ENVIRONMENT) + _definitions("FILES", FILES)
    else:
        lines += [".SH SEE ALSO", ".BR ssdctl (1)"]
    return "\n".join(lines) + "\n"


def _usage(command: Any) -> str:
    arguments = [p.metavar for p in command.params if p.param_type_name == "argument"]
    if getattr(command, "commands", None):
        arguments.append("COMMAND")
    return " ".join(["[OPTIONS]", *arguments])


def _options(command: Any) -> list[str]:
    by_panel: dict[str, list[Any]] = {}
    for parameter in command.params:
        if parameter.hidden:
            continue
        if parameter.param_type_name == "argument":
            by_panel.setdefault("Arguments", []).append(parameter)
        else:
            by_panel.setdefault(parameter.rich_help_panel or "Options", []).append(parameter)
    lines = [".SH OPTIONS"]
    for panel, parameters in by_panel.items():
        lines.append(f".SS {_roff(panel)}")
        for parameter in parameters:
            lines += [".TP", _heading(parameter), _roff(parameter.help or "")]
    return lines


def _heading(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f".I {_roff(parameter.metavar)}"
    flags = ", ".join([*parameter.opts, *parameter.secondary_opts])
    value = "" if parameter.is_flag else f" \\fI{_roff(parameter.metavar or 'VALUE')}\\fR"
    return f"\\fB{_roff(flags)}\\fR{value}"


def _definitions(title: str, entries: dict[str, str]) -> list[str]:
    lines = [f".SH {title}"]
    for term, text in entries.items():
        lines += [".TP", f".B {_roff(term)}", _roff(text)]
    return lines


def _paragraphs(text: str) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return [line for part in paragraphs if part for line in (".PP", _roff(part))][1:]


def _roff(text: str) -> str:
    """Return the text escaped, so that roff prints it literally."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\n", " ")
    return f"\\&{text}" if text.startswith((".", "'")) else text
