"""One result line of the doctor, and the removal of secrets from it."""

from __future__ import annotations

import contextlib
import getpass
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
ABSENT = "absent"  # optional, and not wanted by the config


class CheckResult(NamedTuple):
    """One result: `state` is ok, warn, fail or absent; `remedy` is what to do about it."""

    name: str
    state: str
    detail: str
    remedy: str = ""
    group: str = ""  # its heading in the output


def absent(name: str, detail: str, remedy: str, *, is_wanted: bool) -> CheckResult:
    """Return the result for an absent component: a failure only if the config needs it."""
    if is_wanted:
        return CheckResult(name, FAIL, detail, remedy)
    return CheckResult(name, ABSENT, detail)


def redacted(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Return the results without secrets, so that they can be posted: see `without_secrets`."""
    return [
        check._replace(detail=without_secrets(check.detail), remedy=without_secrets(check.remedy))
        for check in checks
    ]


def without_secrets(text: str) -> str:
    """Return the text without passwords and queries of URLs, the home folder and the user's name.

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
