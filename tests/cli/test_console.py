"""Messages on a terminal: wrapped between words, with links; the closing block of a command."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from ssdctl.cli.console import Console

ESCAPES = re.compile(r"\033\[[0-9;]*m|\033\]8;[^\033]*\033\\")


class Terminal(io.StringIO):
    """A text stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr by a terminal; not in a fixture, after which pytest replaces stderr again."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    return stream


def plain(stream: Terminal) -> str:
    return ESCAPES.sub("", stream.getvalue())


@pytest.mark.parametrize("write", ["warning", "info"])
def test_messages_wrap_between_words(monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    terminal = open_terminal(monkeypatch)
    path = "/data/" + "a-folder/" * 10 + "x.jpg"
    text = " ".join(["abcdefghi"] * 20)
    getattr(Console(), write)(f"{text} {path} {text}")
    assert all(len(line) <= 60 for line in plain(terminal).splitlines() if path not in line)
    assert plain(terminal).removeprefix("warning: ").split() == [*text.split(), path, *text.split()]


def test_a_path_is_a_link_only_where_terminals_have_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    terminal = open_terminal(monkeypatch)
    page = tmp_path / "a b" / "report.html"
    Console().closing([("report", page)], [])
    assert page.as_uri() in terminal.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    Console().closing([("best", page)], [])
    assert terminal.getvalue().count(page.as_uri()) == 1
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    Console().closing([("report", page)], [])
    assert "\033" not in file.getvalue()
    assert str(page) in file.getvalue()


def test_the_next_commands_are_those_of_the_outer_command(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    outer, inner = Console(), Console()
    with outer.show_log():
        with inner.show_log():
            inner.closing([("store", "x")], ["ssdctl inner"])
        outer.closing([("store", "x")], ["ssdctl outer"])
    assert "ssdctl inner" not in plain(terminal)
    assert "ssdctl outer" in plain(terminal)
