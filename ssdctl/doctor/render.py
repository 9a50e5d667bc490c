"""Format check results as text: headings, aligned columns, wrapped lines."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby

from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult

STATE_WIDTH = 4
NARROW = 60  # below this width, details are on separate lines
STYLES = {OK: "green", WARN: "yellow", FAIL: "red"}
Paint = Callable[[str, str], str]


def to_text(
    checks: Sequence[CheckResult], width: int, paint: Paint = lambda text, style: text
) -> str:
    """Return the checks under their headings, and the counts.

    Args:
        checks: In the order of the output.
        width: Of the lines, in columns; paths are not broken and may be longer.
        paint: Applies a style to a text.
    """
    names = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for group, members in groupby(checks, lambda check: check.group):
        lines += [paint(group, "bold")]
        for check in members:
            lines += _lines(check, names, width, paint)
        lines += [""]
    return "\n".join([*lines, counts(checks)])


def counts(checks: Sequence[CheckResult]) -> str:
    """Return the counts, such as `23 ok, 3 warnings, 0 failures`."""
    good, odd, bad = (sum(check.state == state for check in checks) for state in (OK, WARN, FAIL))
    return f"{good} ok, {odd} warning{'s' * (odd != 1)}, {bad} failure{'s' * (bad != 1)}"


def _lines(check: CheckResult, names: int, width: int, paint: Paint) -> list[str]:
    state = paint(f"{check.state:<{STATE_WIDTH}}", STYLES[check.state])
    is_narrow = width < NARROW
    indent = 2 + STATE_WIDTH + 2
    if not is_narrow:
        indent += names + 2
    body = _wrapped(check.detail, width - indent)
    if check.remedy:
        first, *rest = _wrapped(check.remedy, width - indent - 3)
        body += [f"-> {first}", *(f"   {line}" for line in rest)]
    indented = [" " * indent + line for line in body]
    if is_narrow:
        return [f"  {state}  {check.name}", *indented]
    start = f"  {state}  {check.name:<{names}}  "
    return [start + body[0], *indented[1:]]


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap text without breaking paths and commands, so that they can be copied."""
    wrapper = textwrap.TextWrapper(max(width, 20), break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]
