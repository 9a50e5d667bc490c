"""What a terminal shows: untrusted text as visible characters, lines wrapped between words."""

import io
import json
import logging
import re
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.table import Table

from ssdctl.cli.command import exit_after
from ssdctl.cli.console import Console
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import printable, printable_line

HOSTILE = "\x1b]0;title\x07\x1b[2Jcat\rdog\x9b31m\u202egpj.exe\u2066\u2028\x85[red]bold[/red]\udc80"
OBEYED = set("\x1b\x07\r\x9b\u202e\u2066\u2028\x85\udc80")
URL = "http://bob:S3CRET@host/a.zip?X-Amz-Signature=S3CRET"
ESCAPES = re.compile(r"\033\[[0-9;]*m|\033\]8;[^\033]*\033\\")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def replace_streams(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO] = io.StringIO
) -> tuple[io.StringIO, io.StringIO]:
    """Replace stdout and stderr; not in a fixture, after which pytest replaces stderr again."""
    out, err = kind(), kind()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60" if kind is Terminal else "100")
    return out, err


def table(text: str) -> Any:
    table = Table(text, title=text, caption=text)
    table.add_row(text)
    return Group(table, text)


def test_hostile_text_and_secrets_in_messages_and_results(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streams = replace_streams(monkeypatch)
    console = Console()
    console.info(HOSTILE + URL)
    console.warning(f"{HOSTILE}\nerror: fake")
    console.error(DataError(HOSTILE, hint=f"{HOSTILE} {URL}"))
    with console.show_log():
        logging.getLogger("ssdctl.x").warning("%s", HOSTILE)
    assert not caplog.records  # the handlers of the root logger show no message again
    console.result(None, HOSTILE)
    console.result(None, lambda: table(HOSTILE))
    out, err = (stream.getvalue() for stream in streams)
    assert err.count("cat") == 5
    assert err.count("\nerror:") == 1  # a newline does not fake a message
    assert r"\x1b[2J" in err
    assert not re.search(" $", out, re.MULTILINE)
    assert out.count("[red]") == 6  # markup is text
    assert printable_line("a\nb\tc") == r"a\nb\tc"
    with pytest.raises(SystemExit):
        exit_after(RuntimeError(URL + HOSTILE), console)
    err = streams[1].getvalue()
    assert not OBEYED & {*out, *err}
    assert "S3CRET" not in err
    assert err.count("host/a.zip") >= 3


@given(st.text(st.characters(codec=None)))
def test_nothing_that_a_terminal_obeys_stays(text: str) -> None:
    output = printable(text)
    assert {unicodedata.category(c) for c in output if c not in "\n\t"}.isdisjoint(
        {"Cc", "Cs", "Zl", "Zp"}
    )
    assert not {unicodedata.bidirectional(c) for c in output} & {"LRO", "RLO", "LRE", "RLE", "PDF",
                                                               "LRI", "RLI", "FSI", "PDI"}  # fmt: skip
    assert printable(output) == output


def test_a_message_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    _, err = replace_streams(monkeypatch)
    Console().error(DataError("x" * 10**8, hint="y" * 10**8))
    assert len(err.getvalue()) < 50_000
    assert "more characters" in err.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_json_is_exact_and_text_is_escaped(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, write_through=True))
    data = {HOSTILE: [HOSTILE, "\u4e2d\U0001f600"]}
    Console(as_json=True).result(data)
    assert json.loads(written.getvalue()) == data
    Console(as_json=True).result(["\u4e2d"])
    assert written.getvalue().splitlines()[-1].isascii() == (encoding == "ascii")
    Console().result(None, "\u4e2d\U0001f600")
    Console().result(None, lambda: table("\u4e2d"))
    assert (rb"\u4e2d" in written.getvalue().splitlines()[-1]) == (encoding == "ascii")


@pytest.mark.parametrize(("name", "encoding"), [("a\udc80", "utf-8"), ("\u4e2d", "ascii")])
def test_a_name_that_cannot_be_written_is_one_message(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, err = replace_streams(monkeypatch)
    with pytest.raises(UnicodeEncodeError) as caught:
        name.encode(encoding)
    with pytest.raises(SystemExit) as end:
        exit_after(caught.value, Console())
    assert end.value.code == 2
    assert err.getvalue().count("error:") == err.getvalue().count("hint:") == 1
    assert "bug" not in err.getvalue()


def test_a_next_command_stays_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    _, err = replace_streams(monkeypatch, Terminal)
    command = "ssdctl predict " + "a-folder/" * 5 + "run photo.jpg --out drawn"
    Console().closing([("store", "word " * 20)], [command, command])
    lines = [ESCAPES.sub("", line) for line in err.getvalue().splitlines()]
    assert [line.lstrip(" ") for line in lines[-2:]] == [f"next   {command}", command]
    assert all(len(line) <= 60 for line in lines[:-2])
