"""The man pages are up to date and well-formed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "man").glob("*.1"))


def test_pages_are_not_stale() -> None:
    spec = importlib.util.spec_from_file_location("generate_man", DOCS / "generate_man.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = {page.name: page.read_text() for page in PAGES}
    assert written == module.pages(), "run docs/generate_man.py"


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_pages_are_formatted_without_warnings() -> None:
    done = subprocess.run(
        ["man", "--warnings", "-l", "-Tutf8", *map(str, PAGES)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "warmup" in done.stdout
