"""Tables for the HTML that a notebook shows."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def html_table(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return an HTML table; the text of its cells is escaped."""

    def row(tag: str, cells: Sequence[object]) -> str:
        return "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    head = f"<thead><tr>{row('th', heads)}</tr></thead>" if heads else ""
    return f"<table><caption>{html.escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"
