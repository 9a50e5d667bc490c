"""Archives for tests, and the contents of a folder."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path


def zipped(
    content: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] | None = None
) -> bytes:
    """A zip of `content`; `change` may alter each entry before it is written."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, data in content.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if change:
                change(info)
            opened.writestr(info, data)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`: path -> content."""
    files = (p for p in folder.rglob("*") if not p.is_dir())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}
