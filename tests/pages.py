"""Read the documentation's pages: their blocks, commands, inline code, headings and tables."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>run|plugins|file: \S+|store: \S+) -->\n *)?```(?P<kind>\w*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)
ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
every_page = pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
PLACEHOLDERS = {"N": "2", "NAME": "nvidia-r50"}


class Block(NamedTuple):
    """A fenced block; after `<!-- run -->` it is run, after `<!-- file: NAME -->` written, in order.
    What is after `<!-- plugins -->` needs the plugins of the page: process/test_plugins.py."""

    mark: str  # "run", "plugins", "file: NAME", "store: PROGRAM" or ""
    kind: str  # bash, toml, ...
    text: str

    def lines(self) -> list[str]:
        """Return the lines, with continued lines joined."""
        return [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m["mark"] or "", m["kind"], m["text"]) for m in FENCE.finditer(text)]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(text: str) -> list[str]:
    """Return the inline code, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def whole_commands(page: Path) -> list[str]:
    """Return the complete commands, in fenced and indented blocks."""
    fenced = [
        line
        for block in blocks(page)
        if block.kind == "bash" and block.mark != "plugins"
        for line in block.lines()
    ]
    indented = re.findall(r"^ {4,}(ssdctl .*)$", prose(page).replace("\\\n", " "), re.M)
    return [c for c in [*fenced, *indented] if c.startswith("ssdctl ")]


def words_of(text: str) -> list[str]:
    """Return the arguments of a command, up to a pipe or redirection."""
    words = shlex.split(text, comments=True)[1:]
    for sign in (">", "|", "&&"):
        words = words[: words.index(sign)] if sign in words else words
    return [PLACEHOLDERS.get(word, word) for word in words]


def anchors(page: Path) -> set[str]:
    """Return the headings as they are written in links."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def rows(page: Path) -> Iterator[list[str]]:
    """Yield the rows of the tables in `docs/migrating.md`: their flag, ssdctl's, notice."""
    inside = False
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = line.startswith("|") and (inside or cells[0] == "theirs")
        if inside and len(cells) == 3 and cells[0].startswith("`"):
            yield cells
