"""Install an example package: its module and its metadata, in a folder on the path."""

from __future__ import annotations

from pathlib import Path

import pytest


def install_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, entries: str
) -> None:
    """Write `module` with its entry points (the text of entry_points.txt) as pip would."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(str(folder))
