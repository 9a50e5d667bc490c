"""Run all checks in parallel; return their results in order, or as text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from functools import partial
from itertools import groupby

from ssdctl.config import Config
from ssdctl.doctor.check import (
    ABSENT,
    FAIL,
    IMPORT_S,
    OK,
    WARN,
    Check,
    Programs,
    bad,
    without_secrets,
)
from ssdctl.doctor.devices import check_cpu, check_gaudi, check_gpus, check_tpus
from ssdctl.doctor.machine import check_launchers, check_machine, check_software
from ssdctl.runtime.background import run_in_daemon_thread
from ssdctl.runtime.hardware import find_hardware
from ssdctl.runtime.packages import library_error

PATIENCE_S = 2 * IMPORT_S + 30  # for one heading; longer than the timeouts of the probes
MARKS = {OK: "\u2713", WARN: "!", FAIL: "\u2717", ABSENT: "\u2013"}
ASCII_MARKS = {OK: "+", WARN: "!", FAIL: "x", ABSENT: "-"}  # for other encodings
STYLES = {OK: "green", WARN: "yellow", FAIL: "red", ABSENT: "dim"}
NARROW = 60  # below this width, details are on separate lines
ACCELERATORS = ("hpu", "cuda", "tpu")  # in the order in which `--device auto` chooses them
# Shown without -v even if they are fine.
BASIC = ("python", "torch", "cpu", *ACCELERATORS, "cores", "memory", "dataset", "disk", "weights")
REQUESTED = ("Network", "Self-test", "Collectives")  # groups of options
Paint = Callable[[str, str], str]


def examine(config: Config, *, network: bool = False, self_test: bool = False) -> list[Check]:
    """Check this machine without importing torch into this process.

    Args:
        config: Its dataset, device, weights and launcher are checked.
        network: Also check the download hosts.
        self_test: Also write to the disk, join two ranks and train a step.

    Returns:
        The results in display order, grouped by heading, without secrets.
    """
    programs = Programs()
    try:
        results = _check_all(config, programs, network)
        if self_test:
            from ssdctl.doctor.self_test import self_test as run

            results += [c._replace(group="Self-test") for c in run(config, programs)]
    finally:
        programs.stop()
    clean = without_secrets
    return [c._replace(detail=clean(c.detail), remedy=clean(c.remedy)) for c in results]


def _check_all(config: Config, programs: Programs, network: bool) -> list[Check]:
    torch = run_in_daemon_thread(partial(programs.run_probe, "torch", IMPORT_S))
    pci = find_hardware()
    checks: list[tuple[str, Callable[[], list[Check]]]] = [
        ("Python", partial(check_software, config, torch)),
        ("Devices", partial(check_cpu, torch)),
        ("Devices", partial(check_gpus, config, programs, pci, torch)),
        ("Devices", partial(check_gaudi, config, programs, pci)),
        ("Devices", partial(check_tpus, config, programs, pci)),
        ("Machine", partial(check_machine, pci)),
        ("Launchers", partial(check_launchers, config, programs, pci)),
        ("Data", partial(_check_data, config)),
    ]
    if network:
        from ssdctl.doctor.data import check_network

        checks.append(("Network", partial(check_network, config)))
    started = [(group, run_in_daemon_thread(partial(_run, group, run))) for group, run in checks]
    results = []
    for group, future in started:
        try:
            answers = future.result(PATIENCE_S)
        except Late:
            remedy = "a file system or a driver hangs: see dmesg"
            answers = [bad(group.lower(), f"no answer within {PATIENCE_S:g} s", remedy)]
        results += [check._replace(group=group) for check in answers]
    return results


def _check_data(config: Config) -> list[Check]:
    from ssdctl.doctor.data import check_data  # imports numpy, whose libraries may be broken

    return check_data(config)


def _run(group: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Run a check; return a problem if it cannot load a package or read a file."""
    try:
        return check()
    except (ImportError, OSError) as error:
        if (problem := library_error(error)) is not None:
            return [bad(group.lower(), str(problem), problem.hint or "", is_wanted=True)]
        if not isinstance(error, OSError):
            raise
        detail = f"cannot be read: {error.strerror or error}: {error.filename or ''}"
        return [bad(group.lower(), detail.rstrip(": "), "check its permissions")]


def to_text(
    checks: Sequence[Check],
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
    lines = [paint(_verdict(checks, next_command), STYLES[OK if is_ready else FAIL]), ""]
    shown = [
        check
        for check in checks
        if verbose or check.remedy or check.group in REQUESTED
        or (check.state == OK and check.name in BASIC)
    ]  # fmt: skip
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


def problems(checks: Sequence[Check], width: int, paint: Paint) -> str:
    """Return only warnings and failures, one line or more for each."""
    wrong = [check for check in checks if check.state in (WARN, FAIL)]
    names = max((len(check.name) for check in wrong), default=0)
    return "\n".join(line for c in wrong for line in _lines(c, names, width, paint, ASCII_MARKS))


def _verdict(checks: Sequence[Check], next_command: str) -> str:
    """Return one sentence: whether this machine can train, on what, and what to run next."""
    failures = [check.name for check in checks if check.state == FAIL]
    warnings = sum(check.state == WARN for check in checks)
    counted = f"{warnings} warning{'s' * (warnings != 1)}"
    if failures:
        return f"Not ready: {', '.join(failures)}" + (f" ({counted})" if warnings else "")
    if all(check.group == "Collectives" for check in checks):
        return "All ranks answer" + (f", {counted}" if warnings else "")
    by_name = {check.name: check for check in checks}
    usable = [by_name[n] for n in ACCELERATORS if n in by_name and by_name[n].state == OK]
    cores = by_name["cores"].detail.partition(" ")[0] if "cores" in by_name else "?"
    is_native = "cpu" in by_name and "bf16 native" in by_name["cpu"].detail
    device = f"the CPU ({cores} cores, {'bf16' if is_native else 'fp32'})"
    if usable:
        device = usable[0].detail.partition(";")[0]
    return f"Ready to train on {device}{f', {counted}' if warnings else ''}. Try: {next_command}"


def _lines(
    check: Check, names: int, width: int, paint: Paint, marks: Mapping[str, str]
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
