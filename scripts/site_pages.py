"""Add the pages outside docs/ to the documentation site (a hook of mkdocs, see mkdocs.yml)."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {  # in the repository -> on the site
    "README.md": "project.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/RESULTS.md": "results.md",
}


def on_files(files: Any, *, config: Any) -> None:
    """Add the pages."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=text))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite the links of a page from the repository's paths to the site's."""
    on_site = {name: source for source, name in PAGES.items()}
    source = on_site.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def rewritten(match: re.Match[str]) -> str:
        target, anchor = match["target"], match["anchor"] or ""
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        return f"]({PAGES.get(path, path.removeprefix('docs/'))}{anchor})"

    return re.sub(r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)", rewritten, markdown)
