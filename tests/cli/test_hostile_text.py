"""Untrusted text is printed as visible characters; JSON stays exact."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.cli.command import exit_after
from ssdctl.cli.console import Console
from ssdctl.errors import DataError
from ssdctl.runtime.safe_text import printable, printable_line

HOSTILE = "\x1b]0;title\x07\x1b[2Jcat\rdog\x9b31m\u202egpj.exe\u2066\u2028\x85[red]bold[/red]\udc80"
OBEYED = set("\x1b\x07\r\x9b\u202e\u2066\u2028\x85\udc80")
URL = "http://bob:S3CRET@host/a.zip?X-Amz-Signature=S3CRET"


def replaced_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[io.StringIO, io.StringIO]:
    """Replace stdout and stderr by streams that keep all characters, also surrogates."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def table(text: str) -> Any:
    from rich.console import Group
    from rich.table import Table

    table = Table(text, title=text, caption=text)
    table.add_row(text)
    return Group(table, text)


def test_messages_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = replaced_streams(monkeypatch)
    console = Console()
    console.info(HOSTILE)
    console.warning(f"{HOSTILE}\nerror: fake")
    console.error(DataError(HOSTILE, hint=HOSTILE))
    with console.show_log():
        logging.getLogger("ssdctl.x").warning("%s", HOSTILE)
    console.result(None, HOSTILE)
    console.result(None, lambda: table(HOSTILE))
    out, err = (stream.getvalue() for stream in streams)
    assert not OBEYED & {*out, *err}
    assert err.count("cat") == 5
    assert err.count("\nerror:") == 1  # a newline does not fake a message
    assert r"\x1b[2J" in err
    assert out.count("[red]") == 6  # markup is text
    assert printable_line("a\nb\tc") == r"a\nb\tc"


def test_json_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = replaced_streams(monkeypatch)
    data = {HOSTILE: [HOSTILE, "\u4e2d\U0001f600"]}
    Console(as_json=True).result(data)
    assert json.loads(streams[0].getvalue()) == data


def test_a_message_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = replaced_streams(monkeypatch)
    Console().error(DataError("x" * 10**8, hint="y" * 10**8))
    assert len(streams[1].getvalue()) < 50_000
    assert "more characters" in streams[1].getvalue()


def test_messages_hide_secrets_of_urls(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = replaced_streams(monkeypatch)
    console = Console()
    console.info(URL)
    console.warning(f"{URL}: 403")
    console.error(DataError(URL, hint=f"try {URL}"))
    with pytest.raises(SystemExit):
        exit_after(RuntimeError(URL + HOSTILE), console)
    text = streams[1].getvalue()
    assert "S3CRET" not in text
    assert not OBEYED & set(text)
    assert text.count("host/a.zip") >= 4


@pytest.mark.parametrize("as_json", [True, False])
def test_a_terminal_without_unicode(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    console = Console(as_json=as_json)
    console.result({"name": "\u4e2d\U0001f600\udc80"}, "\u4e2d\U0001f600")
    if as_json:
        assert json.loads(written.getvalue()) == {"name": "\u4e2d\U0001f600\udc80"}
    else:
        console.result(None, lambda: table("\u4e2d"))
        assert rb"\u4e2d" in written.getvalue()


@pytest.mark.parametrize(("name", "encoding"), [("a\udc80", "utf-8"), ("\u4e2d", "ascii")])
def test_a_name_that_cannot_be_written_is_one_message(
    name: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = replaced_streams(monkeypatch)
    with pytest.raises(UnicodeEncodeError) as caught:
        name.encode(encoding)
    with pytest.raises(SystemExit) as end:
        exit_after(caught.value, Console())
    assert end.value.code == 2
    text = streams[1].getvalue()
    assert text.count("error:") == text.count("hint:") == 1
    assert "bug" not in text


@given(st.text(st.characters(codec=None)))
def test_nothing_that_a_terminal_obeys_stays(text: str) -> None:
    output = printable(text)
    assert {unicodedata.category(c) for c in output if c not in "\n\t"}.isdisjoint(
        {"Cc", "Cs", "Zl", "Zp"}
    )
    assert not {unicodedata.bidirectional(c) for c in output} & {"LRO", "RLO", "LRE", "RLE", "PDF",
                                                               "LRI", "RLI", "FSI", "PDI"}  # fmt: skip
    assert printable(output) == output
