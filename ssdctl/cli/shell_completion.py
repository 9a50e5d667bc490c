"""Complete command lines in shells: what typer's completion cannot know or read.

The scripts (completions/, `ssdctl --install-completion`) are typer's. They call the program with
`_SSDCTL_COMPLETE=complete_bash` or that of another shell, and typer answers from the options of the
one command on the line: about 0.15 s, without torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

VARIABLE = "_SSDCTL_COMPLETE"
BASH_WORDS, BASH_POSITION = "COMP_WORDS", "COMP_CWORD"
OTHER_WORDS, POWERSHELL_WORD = "_TYPER_COMPLETE_ARGS", "_TYPER_COMPLETE_WORD_TO_COMPLETE"
# Without special characters of a shell: zsh evaluates the output, and run folders have any name.
PLAIN_WORD = re.compile(r"[\w./+=-]+")

Completer = Callable[[str], list[str]]

_joined = ("", "")  # `--flag=` and the start of its value, if the shell has them in one word


def is_requested() -> bool:
    return os.environ.get(VARIABLE, "").startswith("complete_")


def command_line() -> list[str]:
    """Return the words to complete, and leave them to typer in a form that it can read.

    Bash splits `--flag=value` at the `=`, other shells do not split it; and what follows `--` of
    `launch` is a command line of its own.
    """
    global _joined
    is_bash = os.environ[VARIABLE] == "complete_bash"
    text = os.environ.get(BASH_WORDS if is_bash else OTHER_WORDS, "")
    words = _split(text)
    if is_bash:
        position = int(os.environ[BASH_POSITION])
        words = [*words[: position + 1], *[""] * (position + 1 - len(words))]
        words = [w for w in words[:-1] if w != "="] + [words[-1].removeprefix("=")]
    elif not words or text[-1].isspace():
        words.append("")
    if "--" in words[:-1]:
        words = [words[0], *words[words.index("--") + 1 :]]
    flag, equals, value = words[-1].partition("=")
    if equals and flag.startswith("--"):
        _joined = (flag + equals, value)
        words[-1:] = [flag, ""]
        os.environ[POWERSHELL_WORD] = ""
    text = shlex.join(words[:-1]) + (f" {shlex.quote(words[-1])}" if words[-1] else " ")
    os.environ[BASH_WORDS if is_bash else OTHER_WORDS] = text
    os.environ[BASH_POSITION] = str(len(words) - 1)
    _keep_help_plain()
    return words[1:]


def _keep_help_plain() -> None:
    """Keep typer from rendering help with rich: it would wrap it, and take a third of a TAB."""
    with contextlib.suppress(ImportError):  # this typer does not render it
        from typer import _completion_classes

        vars(_completion_classes)["_sanitize_help_text"] = str


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote
        return text.split()


def completer(choices: Iterable[str] = (), metavar: str | None = None) -> Completer | None:
    """Return typer's `autocompletion` of a value, or None if it can be any text or file.

    Args:
        choices: The values that are always possible.
        metavar: The value's placeholder in `--help`: `RUN` completes run folders, `CKPT` also
            detectors, `KEY=VALUE` the keys of settings.
    """
    kinds = {"KEY=VALUE"} if metavar == "KEY=VALUE" else set(re.split(r"\W", metavar or ""))
    if not choices and not kinds & {"KEY=VALUE", "RUN", "CKPT"}:
        return None

    def complete(word: str) -> list[str]:
        prefix, start = _joined if _joined[0] else ("", word)
        values = [*choices, *_values(kinds, start)]
        return [prefix + value for value in values if value.startswith(start)]

    return complete


def _values(kinds: set[str], word: str) -> Sequence[str]:
    if "KEY=VALUE" in kinds:
        from ssdctl.config.settings import all_settings

        return [f"{key}=" for key in all_settings()]
    values: list[str] = []
    if "CKPT" in kinds and word:  # an empty word may become any file
        from ssdctl.download.detectors import DETECTORS

        values += [detector.name for detector in DETECTORS]
    return values + (_run_folders() if "RUN" in kinds else [])


def _run_folders() -> list[str]:
    from ssdctl.runs.layout import RUNS, RunDir

    folders = [path for pattern in (f"{RUNS}/*", "*", "*/run") for path in Path().glob(pattern)]
    configs = [config for path in folders if (config := RunDir(path).config).is_file()]
    configs.sort(key=lambda path: -path.stat().st_mtime)
    return [str(path.parent) for path in configs if PLAIN_WORD.fullmatch(str(path.parent))]
