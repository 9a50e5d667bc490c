"""Complete command lines in shells, from a table: importing typer would make a TAB too slow.

The completion scripts, those in completions/ and those that `ssdctl --install-completion` writes,
are typer's: they call the program with `_SSDCTL_COMPLETE=complete_bash` or that of another shell.
`completions/generate.py` writes the table, completion_table.json.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "_SSDCTL_COMPLETE"
TABLE = Path(__file__).with_name("completion_table.json")
KEY_VALUE = "KEY=VALUE"  # the metavar of --set
RUN = "RUN"  # in a metavar: run folders are completed
CHECKPOINT = "CKPT"  # in a metavar: detectors are completed, too
# Without special characters of a shell: zsh evaluates the output, and run folders have any name.
PLAIN_WORD = re.compile(r"[\w./+=-]+")
NOT_PLAIN = re.compile(r"[^\w ,.;/+=%-]+")


class Completion(NamedTuple):
    """One possible completion of a word."""

    value: str
    help: str = ""


def is_requested() -> bool:
    """Return whether a shell requests completions, by the script that typer generates."""
    return os.environ.get(VARIABLE, "").startswith("complete_")


def complete() -> int:
    """Print the completions for the shell that requests them; return the exit code.

    For fish, 1 means that there are none and that it shall complete file names.
    """
    shell = os.environ[VARIABLE].partition("_")[2]
    before, word = _bash_line() if shell == "bash" else _line(shell)
    flag, equals, value = word.partition("=")
    if equals and flag.startswith("--") and shell != "bash":
        completions = [
            Completion(flag + "=" + c.value, c.help) for c in find([*before, flag], value)
        ]
    else:
        completions = find(before, word)
    completions = [c for c in completions if PLAIN_WORD.fullmatch(c.value)]
    if shell == "fish" and os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return 0 if completions else 1
    sys.stdout.write(_formatted(shell, completions))
    return 0


def _bash_line() -> tuple[list[str], str]:
    """Return the words before the cursor and the one at it; bash splits `--key=value` at `=`."""
    position = int(os.environ["COMP_CWORD"])
    words = os.environ["COMP_WORDS"].split("\n")[: position + 1]
    words += [""] * (position + 1 - len(words))
    *before, word = words[1:] or [""]
    if word == "=":
        word = ""
    return [w for w in before if w != "="], word


def _line(shell: str) -> tuple[list[str], str]:
    text = os.environ.get("_TYPER_COMPLETE_ARGS", "")
    try:
        words = shlex.split(text)[1:]
    except ValueError:  # an unclosed quote
        words = text.split()[1:]
    if shell in ("powershell", "pwsh"):
        word = os.environ.get("_TYPER_COMPLETE_WORD_TO_COMPLETE", "")
        return (words[:-1] if word else words), word
    if words and not text[-1].isspace():
        return words[:-1], words[-1]
    return words, ""


def find(before: list[str], word: str) -> list[Completion]:
    """Return the completions of `word` after the words `before`; none if any file may follow."""
    table = node = json.loads(TABLE.read_text(encoding="utf-8"))
    option = None  # the option that the next word is the value of
    for text in before:
        if text == "--":
            node = table  # `launch ... -- evaluate`
        elif option is not None:
            option = None
        elif "value" in node["options"].get(text, ()):
            option = node["options"][text]
        elif text in node.get("commands", {}):
            node = node["commands"][text]
    if option is not None:
        if option["value"] == KEY_VALUE:
            return [Completion(f"{key}=") for key in table["keys"] if key.startswith(word)]
        return _values(option, word, table["detectors"])
    if word.startswith("-"):
        return [Completion(n, o["help"]) for n, o in node["options"].items() if n.startswith(word)]
    if commands := node.get("commands"):
        return [Completion(n, c["help"]) for n, c in commands.items() if n.startswith(word)]
    return [
        c for argument in node["arguments"] for c in _values(argument, word, table["detectors"])
    ]


def _values(option: Mapping[str, Any], word: str, detectors: Sequence[str]) -> list[Completion]:
    values = [Completion(choice) for choice in option.get("choices", ()) if choice.startswith(word)]
    kinds = re.split(r"\W", option["value"])
    if CHECKPOINT in kinds and word:  # an empty word may become any file
        values += [Completion(name) for name in detectors if name.startswith(word)]
    if RUN in kinds:
        values += [Completion(run) for run in _run_folders() if run.startswith(word)]
    return values


def _run_folders() -> list[str]:
    """Return run folders in the usual places, the newest first."""
    from ssdctl.runs.layout import RUNS, RunDir

    folders = [path for pattern in (f"{RUNS}/*", "*", "*/run") for path in Path().glob(pattern)]
    configs = [config for path in folders if (config := RunDir(path).config).is_file()]
    configs.sort(key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in configs]


def _formatted(shell: str, completions: list[Completion]) -> str:
    """Return completions in the format that the typer script of a shell reads."""
    if shell == "zsh":
        if not completions:
            return "_files"
        pairs = (f'"{c.value}"' + (f':"{_plain(c.help)}"' if c.help else "") for c in completions)
        return "_arguments '*: :((" + "\n".join(pairs) + "))'"
    if shell == "fish":
        return "\n".join(f"{c.value}\t{c.help}" if c.help else c.value for c in completions)
    if shell in ("powershell", "pwsh"):
        return "\n".join(f"{c.value}:::{c.help or ' '}" for c in completions)
    return "\n".join(c.value for c in completions)


def _plain(text: str) -> str:
    return NOT_PLAIN.sub(" ", text)
