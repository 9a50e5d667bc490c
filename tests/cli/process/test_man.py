"""The man pages that the wheel contains are well-formed."""

from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from ssdctl.cli.main import COMMANDS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_each_command_has_a_page_without_warnings(tmp_path: Path) -> None:
    for name, text in runpy.run_path(str(DOCS / "man_pages.py"))["pages"]().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = sorted(tmp_path.iterdir())
    assert len(pages) > len(COMMANDS)
    done = subprocess.run(
        ["man", "--warnings", "-l", "-Tutf8", *map(str, pages)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "warmup" in done.stdout
