"""Build hook: the wheel contains a man page for each command, made from its help.

Wheels install them to share/man/man1, in which `man` searches for every program on the path.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManPages(BuildHookInterface):
    """Add the man pages to the shared data of the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the pages to a temporary folder."""
        if version == "editable":
            return
        sys.path[:0] = [self.root, str(Path(self.root, "docs"))]
        from man_pages import pages

        self.folder = tempfile.TemporaryDirectory()
        for name, text in pages().items():
            path = Path(self.folder.name, name)
            path.write_text(text, encoding="utf-8")
            build_data["shared_data"][str(path)] = f"share/man/man1/{name}"
