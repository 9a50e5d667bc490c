"""The man pages that the wheel contains are well-formed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from ssdctl.cli.main import COMMANDS

DOCS = Path(__file__).parents[3] / "docs"


def write_pages(folder: Path) -> list[Path]:
    spec = importlib.util.spec_from_file_location("man_pages", DOCS / "man_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, text in module.pages().items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_each_command_has_a_page_without_warnings(tmp_path: Path) -> None:
    pages = write_pages(tmp_path)
    assert len(pages) > len(COMMANDS)
    done = subprocess.run(
        ["man", "--warnings", "-l", "-Tutf8", *map(str, pages)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "warmup" in done.stdout
