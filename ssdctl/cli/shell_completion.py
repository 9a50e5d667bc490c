"""What TAB gives, from a table: typer and its packages would take longer than a TAB may.

The shells ask as the scripts in completions/ have it, which are typer's (also those that
`ssdctl --install-completion` writes): `_SSDCTL_COMPLETE=complete_bash` and its like.
`completions/generate.py` writes the table, completion_table.json.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "_SSDCTL_COMPLETE"
TABLE = Path(__file__).with_name("completion_table.json")
KEY_VALUE = "KEY=VALUE"  # the metavar of --set
RUN = "RUN"  # in a metavar: run folders are offered
# What no shell reads as anything else: zsh evaluates our answer, and run folders have any name.
PLAIN_WORD = re.compile(r"[\w./+=-]+")
NOT_PLAIN = re.compile(r"[^\w ,.;/+=%-]+")


class Word(NamedTuple):
    """One answer."""

    value: str
    help: str = ""


def is_asked() -> bool:
    """Whether a shell wants words (its script comes from typer)."""
    return os.environ.get(VARIABLE, "").startswith("complete_")


def answer() -> int:
    """Print the words for the shell that asks; the exit code is part of the answer for fish."""
    shell = os.environ[VARIABLE].partition("_")[2]
    before, word = _bash_line() if shell == "bash" else _line(shell)
    flag, equals, value = word.partition("=")
    if equals and flag.startswith("--") and shell != "bash":
        words = [Word(flag + "=" + w.value, w.help) for w in find([*before, flag], value)]
    else:
        words = find(before, word)
    words = [w for w in words if PLAIN_WORD.fullmatch(w.value)]
    if shell == "fish" and os.environ.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        return 0 if words else 1  # 1: fish offers files
    sys.stdout.write(_formatted(shell, words))
    return 0


def _bash_line() -> tuple[list[str], str]:
    """The words before the cursor and the one at it. Bash cuts `--key=value` at the sign."""
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
    except ValueError:  # a quote that is still open
        words = text.split()[1:]
    if shell in ("powershell", "pwsh"):
        word = os.environ.get("_TYPER_COMPLETE_WORD_TO_COMPLETE", "")
        return (words[:-1] if word else words), word
    if words and not text[-1].isspace():
        return words[:-1], words[-1]
    return words, ""


def find(before: list[str], word: str) -> list[Word]:
    """What may stand at `word`; nothing where any file may."""
    table = node = json.loads(TABLE.read_text(encoding="utf-8"))
    expected = None  # the option whose value comes next
    for text in before:
        if text == "--":
            node = table  # `launch ... -- evaluate`
        elif expected is not None:
            expected = None
        elif "value" in node["options"].get(text, ()):
            expected = node["options"][text]
        elif text in node.get("commands", {}):
            node = node["commands"][text]
    if expected is not None:
        if expected["value"] == KEY_VALUE:
            return [Word(f"{key}=") for key in table["keys"] if key.startswith(word)]
        return _values(expected, word)
    if word.startswith("-"):
        return [Word(n, o["help"]) for n, o in node["options"].items() if n.startswith(word)]
    if commands := node.get("commands"):
        return [Word(n, c["help"]) for n, c in commands.items() if n.startswith(word)]
    return [found for argument in node["arguments"] for found in _values(argument, word)]


def _values(option: Mapping[str, Any], word: str) -> list[Word]:
    found = [Word(choice) for choice in option.get("choices", ()) if choice.startswith(word)]
    if RUN in re.split(r"\W", option["value"]):
        found += [Word(run) for run in _run_folders() if run.startswith(word)]
    return found


def _run_folders() -> list[str]:
    """Run folders in the usual places, the newest first."""
    from ssdctl.runs.layout import RUNS, RunDir

    folders = [path for pattern in (f"{RUNS}/*", "*", "*/run") for path in Path().glob(pattern)]
    configs = [config for path in folders if (config := RunDir(path).config).is_file()]
    configs.sort(key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in configs]


def _formatted(shell: str, words: list[Word]) -> str:
    if shell == "zsh":
        if not words:
            return "_files"
        pairs = (f'"{w.value}"' + (f':"{_plain(w.help)}"' if w.help else "") for w in words)
        return "_arguments '*: :((" + "\n".join(pairs) + "))'"
    if shell == "fish":
        return "\n".join(f"{w.value}\t{w.help}" if w.help else w.value for w in words)
    if shell in ("powershell", "pwsh"):
        return "\n".join(f"{w.value}:::{w.help or ' '}" for w in words)
    return "\n".join(w.value for w in words)


def _plain(text: str) -> str:
    return NOT_PLAIN.sub(" ", text)
