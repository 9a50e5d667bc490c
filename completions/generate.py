"""Write the completion scripts and the table of completions; a test fails if they are stale.

python completions/generate.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ssdctl.cli.main import click_tree
from ssdctl.cli.shell_completion import TABLE
from ssdctl.config.settings import all_settings
from ssdctl.download.detectors import DETECTORS

FILES = {
    "ssdctl.bash": "bash",
    "_ssdctl": "zsh",
    "ssdctl.fish": "fish",
    "ssdctl.ps1": "powershell",
}
# zsh loads the script at the first completion: it completes then, not only from the second one on.
ZSH_FIRST_COMPLETION = """
if [[ $funcstack[1] == _ssdctl ]]; then
  _ssdctl_completion
fi
"""
RUN = "import sys; sys.argv[0] = 'ssdctl'; from ssdctl.cli.main import main; main()"


def script(shell: str) -> str:
    """Return the completion script for a shell: typer's, complete for zsh."""
    environment = {**os.environ, "_SSDCTL_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-c", RUN]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    text = result.stdout.strip() + "\n"  # zsh requires #compdef on the first line
    return text + ZSH_FIRST_COMPLETION if shell == "zsh" else text


def completion_table() -> str:
    """Return the table as JSON: commands, options with their values, arguments."""
    table = {
        "keys": list(all_settings()),
        "detectors": [detector.name for detector in DETECTORS],
        **_node(click_tree()),
    }
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def _node(command: Any) -> dict[str, Any]:
    node: dict[str, Any] = {"help": _first_line(command.help), "options": {}, "arguments": []}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            node["arguments"].append(_value(command, parameter))
            continue
        option = {"help": _first_line(parameter.help)}
        if not parameter.is_flag:
            option |= _value(command, parameter)
        node["options"] |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], option)
    node["options"]["--help"] = {"help": "Show this message and exit"}
    if commands := getattr(command, "commands", None):
        node["commands"] = {name: _node(child) for name, child in commands.items()}
    return node


def _value(command: Any, parameter: Any) -> dict[str, Any]:
    context = command.make_context("ssdctl", [], resilient_parsing=True)
    choices = [item.value for item in parameter.shell_complete(context, "")]
    value = {"value": parameter.metavar or "VALUE"}
    return {**value, "choices": choices} if choices else value


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


if __name__ == "__main__":
    for name, shell in FILES.items():
        (Path(__file__).parent / name).write_text(script(shell), encoding="utf-8")
    TABLE.write_text(completion_table(), encoding="utf-8")
