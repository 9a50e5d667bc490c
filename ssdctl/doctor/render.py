"""Format check results as text: a verdict, then a line for each check with its mark."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from ssdctl.doctor.check import ABSENT, FAIL, OK, WARN, CheckResult

MARKS = {OK: "\u2713", WARN: "!", FAIL: "\u2717", ABSENT: "\u2013"}
ASCII_MARKS = {OK: "+", WARN: "!", FAIL: "x", ABSENT: "-"}  # for other encodings
NARROW = 60  # below this width, details are on separate lines
STYLES = {OK: "green", WARN: "yellow", FAIL: "red", ABSENT: "dim"}
ACCELERATORS = ("hpu", "cuda", "tpu")  # in the order in which `--device auto` chooses them
# Shown without -v even if they are fine.
BASIC = ("python", "torch", "cpu", *ACCELERATORS, "cores", "memory", "dataset", "disk", "weights")
REQUESTED = ("Network", "Self-test")  # groups of options
Paint = Callable[[str, str], str]


def to_text(
    checks: Sequence[CheckResult],
    width: int,
    *,
    next_command: str,
    verbose: bool = False,
    paint: Paint = lambda text, style: text,
    marks: Mapping[str, str] = MARKS,
) -> str:
    """Return the verdict and the checks.

    Args:
        checks: In the order of the output.
        width: Of the lines, in columns; paths are not broken and may be longer.
        next_command: What the verdict suggests if nothing failed.
        verbose: Show all checks, under their headings.
        paint: Applies a style to a text.
        marks: The mark of each state.
    """
    is_ready = all(check.state != FAIL for check in checks)
    lines = [paint(verdict(checks, next_command), STYLES[OK if is_ready else FAIL]), ""]
    shown = [c for c in checks if verbose or _is_basic(c)]
    names = max((len(check.name) for check in shown), default=0)
    for group, members in groupby(shown, lambda check: check.group if verbose else ""):
        lines += [paint(group, "bold")] if group else []
        for check in members:
            lines += _lines(check, names, width, paint, marks)
        lines += [""] if verbose else []
    if absent := [c.name for c in checks if c.state == ABSENT and c not in shown]:
        text = f"{marks[ABSENT]} not here, optional: {', '.join(absent)}"
        lines += [paint("  " + line, "dim") for line in _wrapped(text, width - 2)]
    if hidden := len(checks) - len(shown):
        lines += ["", f"{hidden} more checks: ssdctl doctor -v"]
    return "\n".join(lines).rstrip("\n")


def problems(checks: Sequence[CheckResult], width: int, paint: Paint) -> str:
    """Return only warnings and failures, one line or more for each."""
    bad = [check for check in checks if check.state in (WARN, FAIL)]
    names = max((len(check.name) for check in bad), default=0)
    return "\n".join(line for c in bad for line in _lines(c, names, width, paint, ASCII_MARKS))


def verdict(checks: Sequence[CheckResult], next_command: str) -> str:
    """Return one sentence: whether this machine can train, on what, and what to run next."""
    failures = [check.name for check in checks if check.state == FAIL]
    warnings = sum(check.state == WARN for check in checks)
    counted = f"{warnings} warning{'s' * (warnings != 1)}"
    if failures:
        return f"Not ready: {', '.join(failures)}" + (f" ({counted})" if warnings else "")
    text = f"Ready to train on {_device({check.name: check for check in checks})}"
    return f"{text}{f', {counted}' if warnings else ''}. Try: {next_command}"


def _device(checks: Mapping[str, CheckResult]) -> str:
    for name in ACCELERATORS:
        if name in checks and checks[name].state == OK:
            return checks[name].detail.partition(";")[0]
    cores = checks["cores"].detail.partition(" ")[0] if "cores" in checks else "?"
    is_native = "cpu" in checks and "bf16 native" in checks["cpu"].detail
    return f"the CPU ({cores} cores, {'bf16' if is_native else 'fp32'})"


def _is_basic(check: CheckResult) -> bool:
    is_requested = check.group in REQUESTED
    return bool(check.remedy) or is_requested or (check.state == OK and check.name in BASIC)


def _lines(
    check: CheckResult, names: int, width: int, paint: Paint, marks: Mapping[str, str]
) -> list[str]:
    mark = paint(marks[check.state], STYLES[check.state])
    is_narrow = width < NARROW
    indent = 4 if is_narrow else names + 6
    body = _wrapped(check.detail, width - indent)
    if check.remedy:
        first, *rest = _wrapped(check.remedy, width - indent - 3)
        body += [f"-> {first}", *(f"   {line}" for line in rest)]
    indented = [" " * indent + line for line in body]
    if is_narrow:
        return [f"  {mark} {check.name}", *indented]
    return [f"  {mark} {check.name:<{names}}  " + body[0], *indented[1:]]


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap text without breaking paths and commands, so that they can be copied."""
    wrapper = textwrap.TextWrapper(max(width, 20), break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text) or [""]
