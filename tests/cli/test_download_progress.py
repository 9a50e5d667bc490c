"""The progress display of downloads: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import select
import struct
import sys
import termios

import pytest

from ssdctl.cli import download
from ssdctl.cli.console import Console
from ssdctl.cli.download import fetching

MB = 1_000_000


def test_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 10)  # seconds
    monkeypatch.setattr("rich.console.monotonic", lambda: next(clock))
    monkeypatch.setattr(download, "LINE_INTERVAL_S", 0)
    with fetching(Console(quiet=True)) as progress:
        progress("a.zip", 1, 2)
    with fetching(Console(), ["a.zip", "b.zip"]) as progress:
        progress("checking a.zip", 1 * MB, 2 * MB)
        for done in (10, 50, 60):
            progress("a.zip", done * MB, 100 * MB)
        progress("verifying a.zip", 50 * MB, 100 * MB)
        progress("b.zip", 0, 100 * MB)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["checking a.zip: 1.0 of 2.0 MB", "a.zip (1 of 2): 10.0 of 100.0 MB"]
    assert lines[3].startswith("a.zip (1 of 2): 60.0 of 100.0 MB, 0.5 MB/s, 0:01:20 left")
    assert lines[4:] == ["verifying a.zip: 50.0 of 100.0 MB", "b.zip (2 of 2): 0.0 of 100.0 MB"]


def test_only_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    with fetching(Console()) as progress:
        for done in range(100):
            progress("a.zip", done, 100)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal_end = pty.openpty()
    fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal_end, "w") as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", terminal)
        with fetching(Console(), ["a.zip", "b.zip"]) as progress:
            progress("a.zip", 10 * MB, 100 * MB)
            progress("a.zip", 0, 100 * MB)  # from zero
            progress("unpacking a.zip", 0, 100 * MB)
            progress("b.zip", 20 * MB, 100 * MB)
        content = b""
        while select.select([controller], [], [], 0.2)[0]:
            content += os.read(controller, 100_000)
    os.close(controller)
    output = content.decode()
    for shown in ("b.zip (2 of 2)", "20.0/100.0 MB", "20%"):
        assert shown in output
