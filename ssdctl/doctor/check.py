"""One line of the doctor's answer, and what must not stand in it."""

from __future__ import annotations

import contextlib
import getpass
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"


class Check(NamedTuple):
    """One line: `state` is ok, warn or fail; `remedy` says what to do about it."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    group: str = ""  # the heading that it stands under


def absent(name: str, detail: str, remedy: str, *, is_wanted: bool) -> Check:
    """A thing that is not here: a failure where the config names it, else nothing to mend."""
    if is_wanted:
        return Check(name, FAIL, detail, remedy)
    return Check(name, OK, detail)


def redacted(checks: Iterable[Check]) -> list[Check]:
    """The checks without what nobody wants in a public issue: see `without_secrets`."""
    return [
        check._replace(detail=without_secrets(check.detail), remedy=without_secrets(check.remedy))
        for check in checks
    ]


def without_secrets(text: str) -> str:
    """The text without passwords and queries of URLs, the home folder and the user's name.

    Paths stay usable in a shell: ~/coco, /scratch/$USER/coco.
    """
    text = re.sub(
        r"\033\[[0-9;]*[A-Za-z]|[\0-\037\177]+", " ", text
    ).strip()  # other programs' colours
    text = re.sub(r"://\S*@", "://***@", text)
    text = re.sub(r"(\w://[^\s?]+)\?[^\s,)]+", r"\1?***", text)
    home = ""
    with contextlib.suppress(RuntimeError):  # an id without a home, as in some containers
        home = str(Path("~").expanduser())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w/.-]){re.escape(home)}(?![\w.-])", "~", text)
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # nor a name
        return text
    return re.sub(rf"(?<=/){re.escape(user)}(?=/|$|[\s:,;)'\"])", "$USER", text)
