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
    "SECURITY.md": "vulnerabilities.md",
    "benchmarks/RESULTS.md": "results.md",
    "docs/notebook.ipynb": "notebook.md",  # rendered by site_notebook.py
}
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)"[^>]*>\s*'
    r'<img (?P<before>[^>]*)src="(?P<light>[^"]+)"(?P<after>[^>]*)>\s*</picture>'
)


def on_files(files: Any, *, config: Any) -> None:
    """Add the pages."""
    for source, name in PAGES.items():
        if source.endswith(".md") and (ROOT / source).is_file():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, name, content=text))


# Wide tables get their scrolling frame when the page is shown.
FOCUSABLE = """<script>
document$.subscribe(() => setTimeout(() => {
  const frames = document.querySelectorAll(".md-typeset__scrollwrap, pre > code")
  for (const frame of frames) frame.tabIndex = 0
}))
</script>
</body>"""


def on_post_page(output: str, **_: Any) -> str:
    """Keep a page from asking another host for the repository's stars; name its dialog, and let
    the keyboard scroll code and tables."""
    output = output.replace(' data-md-component="source"', "")
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace("</body>", FOCUSABLE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of a page from the repository's paths to the site's.

    Files that the site does not have are linked in the repository.

    An image for light and dark (`<picture>`) becomes two, which follow the site's own switch.
    """
    on_site = {name: source for source, name in PAGES.items()}
    source = on_site.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_this_site(target: str) -> str:
        if ":" in target:
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in PAGES or path.startswith("docs/"):
            return PAGES.get(path, path.removeprefix("docs/"))
        return f"{config['repo_url']}/blob/main/{path}"

    def two_images(match: re.Match[str]) -> str:
        # Raw HTML is not rewritten by mkdocs: relative to the page's folder on the site.
        up = "" if page.file.src_uri == "README.md" else "../"
        images = (
            f'<img {match["before"]}src="{up}{on_this_site(match[theme])}#only-{theme}"'
            f"{match['after']}>"
            for theme in ("light", "dark")
        )
        return "\n".join(images)

    markdown = re.sub(
        r"\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
        lambda match: f"]({on_this_site(match['target'])}{match['anchor'] or ''})",
        markdown,
    )
    return PICTURE.sub(two_images, markdown)
