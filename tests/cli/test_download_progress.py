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
from types import SimpleNamespace

import pytest

from ssdctl.cli import download
from ssdctl.cli.console import Console
from ssdctl.cli.download import ByteProgress

MB = 1_000_000


def test_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LINE_INTERVAL_S", 0.0)
    clock = itertools.count(0, 10)  # seconds
    monkeypatch.setattr(download, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    progress = ByteProgress(Console())
    progress("a.zip", 10 * MB, 100 * MB)
    progress("a.zip", 50 * MB, 100 * MB)
    progress("verifying a.zip", 100 * MB, 100 * MB)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("a.zip: 100.0 MB, 10.0 MB ")
    assert "50%" in lines[1]
    assert "2.0 MB/s" in lines[1]  # 40 MB in 20 s
    assert "min left" in lines[1]
    assert lines[2].startswith("verifying a.zip")


def test_work_on_local_files_reports_only_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    ByteProgress(Console(quiet=True))("a.zip", 1, 2)
    progress = ByteProgress(Console())
    for verb in ("checking", "verifying", "unpacking"):
        progress(f"{verb} a.zip", MB, 20 * MB)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{verb} a.zip: 20.0 MB" for verb in ("checking", "verifying", "unpacking")]


def test_lines_include_all_files(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "LINE_INTERVAL_S", 0.0)
    progress = ByteProgress(Console(), {"a.zip": 100 * MB, "b.zip": 300 * MB})
    progress("a.zip", 0, 100 * MB)
    progress("a.zip", 100 * MB, 100 * MB)
    progress("unpacking a.zip", 5, 10)
    progress("b.zip", 0, 300 * MB)
    progress("b.zip", 100 * MB, 300 * MB)
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert "all files: 25%" in lines[1]
    assert "all files: 50%" in lines[4]
    assert lines[4].count("left") == 2


def test_a_display_of_all_files_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal_end = pty.openpty()
    fcntl.ioctl(terminal_end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with open(terminal_end, "w") as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = ByteProgress(Console(), {"a.zip": 100 * MB, "b.zip": 100 * MB})
        progress("a.zip", 10 * MB, 100 * MB)
        progress("a.zip", 0, 100 * MB)  # from zero
        progress("a.zip", 100 * MB, 100 * MB)
        progress("unpacking a.zip", 0, 100 * MB)
        progress("b.zip", 20 * MB, 100 * MB)
        progress.close()
        content = b""
        while select.select([controller], [], [], 0.2)[0]:
            content += os.read(controller, 100_000)
    os.close(controller)
    output = content.decode()
    assert "all files" in output
    assert "120.0/200.0 MB" in output
    assert "b.zip" in output
    assert "20%" in output
    assert "60%" in output
