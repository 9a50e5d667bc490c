"""Make untrusted text (names from files, a server's reason phrase) safe to print on a terminal.

printable("a\x1b[2Jb")       # 'a\\x1b[2Jb'
printable_line("a\nerror")  # 'a\\nerror'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters (C0, DEL, C1) but tab and newline, line separators, direction overrides,
# surrogates, invisible tags.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    "\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """Replace what a terminal would obey instead of show by its escape sequence in Python.

    Tabs and newlines stay.
    """
    return _UNPRINTABLE.sub(_escape, text)


def printable_line(text: str) -> str:
    """Like `printable`, but tabs and newlines are escaped too: the result is one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def printable_message(text: str) -> str:
    """Make a message printable; later lines are indented, so none looks like a message."""
    first, *more = printable(text).split("\n")
    return "\n".join([first, *(line if line[:1].isspace() else f"  {line}" for line in more)])


def listed(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """Return the first items in one line, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
