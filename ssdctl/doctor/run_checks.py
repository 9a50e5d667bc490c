"""Run all checks in parallel, then the self-test; return the results in order, or as text."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from functools import partial
from itertools import groupby
from types import ModuleType

import msgspec

from ssdctl.config import Config
from ssdctl.distributed import free_port
from ssdctl.doctor import ABSENT, FAIL, IMPORT_S, OK, WARN, Check, Doctor, ProgramOutput, result
from ssdctl.doctor.machine import (
    check_cpu,
    check_gaudi,
    check_gpus,
    check_machine,
    check_plugins,
    check_software,
    check_tpus,
)
from ssdctl.runtime.packages import library_error
from ssdctl.runtime.safe_text import redact_urls
from ssdctl.runtime.system import home_folders, run_in_daemon_thread

log = logging.getLogger(__name__)
PATIENCE_S = 2 * IMPORT_S + 30  # for one heading; longer than the timeouts of the probes
MARKS = {OK: "\u2713", WARN: "!", FAIL: "\u2717", ABSENT: "\u2013"}
ASCII_MARKS = {OK: "+", WARN: "!", FAIL: "x", ABSENT: "-"}  # for other encodings
STYLES = {OK: "green", WARN: "yellow", FAIL: "red", ABSENT: "dim"}
ACCELERATORS = ("hpu", "cuda", "tpu")  # in the order in which `--device auto` chooses them
# Shown without -v even if they are fine.
BASIC = ("python", "torch", "cpu", *ACCELERATORS, "cores", "memory", "dataset", "disk", "weights")
REQUESTED = ("Network", "Self-test")  # groups of options
RANKS_S, STEP_S = 120.0, 400.0  # a first step may have to be compiled
JOB_PREFIXES = ("OMPI_", "SLURM_", "PMI", "TORCHELASTIC_")
JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
Paint = Callable[[str, str], str]
Checks = Callable[[Doctor], Iterable[Check]]


def _data() -> ModuleType:
    from ssdctl.doctor import data  # imports numpy, whose libraries may be broken

    return data


CHECKS: tuple[tuple[str, Checks], ...] = (
    ("Python", check_software),
    ("Devices", check_cpu),
    ("Devices", check_gpus),
    ("Devices", check_gaudi),
    ("Devices", check_tpus),
    ("Machine", check_machine),
    ("Plugins", check_plugins),
    ("Data", lambda doctor: _data().check_data(doctor)),
)
NETWORK: tuple[str, Checks] = ("Network", lambda doctor: _data().check_network(doctor))


def examine(config: Config, *, network: bool = False, self_test: bool = False) -> list[Check]:
    """Check this machine without importing torch into this process; return clean results in order.

    Args:
        network: Also check the download hosts.
        self_test: Also join two ranks and train a step.
    """
    doctor = Doctor(config)
    try:
        doctor.start_torch()
        checks = (*CHECKS, NETWORK) if network else CHECKS
        started = [(n, run_in_daemon_thread(partial(_run, n, c, doctor))) for n, c in checks]
        results = []
        for group, future in started:
            try:
                answers = future.result(PATIENCE_S)
            except Late:
                remedy = "a file system or a driver hangs: see dmesg"
                answers = [result(group.lower(), f"no answer within {PATIENCE_S:g} s", remedy)]
            results += [check._replace(group=group) for check in answers]
        if self_test:
            for text, test in SELF_TESTS:
                log.info("self-test: %s", text.format(config.train.device))
                results.append(test(doctor)._replace(group="Self-test"))
    finally:
        doctor.stop()
    clean = without_secrets
    return [c._replace(detail=clean(c.detail), remedy=clean(c.remedy)) for c in results]


def without_secrets(text: str) -> str:
    """Return the text without passwords and queries of URLs, the home folder and the user's name.

    Paths stay usable in a shell: ~/coco, ~/'my photos', '/scratch/'$USER'/my photos'.
    """
    # Colors of other programs, and control characters.
    text = re.sub(r"\033\[[0-9;]*[A-Za-z]|[\0-\037\177]+", " ", text).strip()
    text = redact_urls(text)
    for home in home_folders():
        folder = rf"(?<![\w/.-])('?){re.escape(str(home))}"
        text = re.sub(rf"{folder}/", r"~/\1", text)
        text = re.sub(rf"{folder}\1(?![\w.-])", "~", text)
    with contextlib.suppress(OSError, KeyError):  # an id without a name
        user = re.compile(rf"(?<=/){re.escape(getpass.getuser())}(?=/|$|[\s:,;)'\"])")
        text = re.sub(r"(?<!\w)'[^']*'", lambda m: user.sub("'$USER'", m[0]), text)
        text = user.sub("$USER", text)
    return text


def _run(group: str, check: Checks, doctor: Doctor) -> list[Check]:
    """Run a check; report packages that do not load and files that cannot be read as problems."""
    results: list[Check] = []
    try:
        results.extend(check(doctor))
    except (ImportError, OSError) as error:
        if (problem := library_error(error)) is not None:
            results.append(result(group.lower(), str(problem), problem.hint or "", is_wanted=True))
        elif isinstance(error, OSError):
            detail = f"cannot be read: {error.strerror or error}: {error.filename or ''}"
            results.append(result(group.lower(), detail.rstrip(": "), "check its permissions"))
        else:
            raise
    return results


def _ranks(doctor: Doctor) -> Check:
    """Start two ranks, without the variables of a job that this process belongs to."""
    start, common = time.perf_counter(), _without_job()
    common |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def run(rank: str) -> ProgramOutput:
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
        return doctor.run_probe("ranks", timeout_s=RANKS_S, environment=environment)

    started = [run_in_daemon_thread(partial(run, rank)) for rank in "01"]
    answers = [future.result() for future in started]
    if problems := [f"rank {i}: {a.problem}" for i, a in enumerate(answers) if a.problem]:
        remedy = (
            "the machine's own name must resolve (/etc/hosts) and loopback must be open; "
            "GLOO_SOCKET_IFNAME=lo restricts gloo to loopback"
        )
        return result("all-reduce", "; ".join(problems), remedy, is_wanted=True)
    facts, spent = answers[0].facts(), time.perf_counter() - start
    what = f"{facts['bytes'] / 1e6:.0f} MB in {1000 * facts['all_reduce_s']:.1f} ms"
    return result("all-reduce", f"two ranks over gloo: {what}; {spent:.1f} s in all")


def _step(doctor: Doctor) -> Check:
    start, config = time.perf_counter(), doctor.config
    text = msgspec.json.encode(config).decode()
    answer = doctor.run_probe("step", timeout_s=STEP_S, text=text, environment=_without_job())
    facts = answer.facts()
    where = f"--device {config.train.device}"
    if "device" in facts:
        how = f"{facts['precision']}, {facts['execution']}"
        where += f" is {facts['device']}: {facts['label']}, {how}"
    if answer.problem or "loss" not in facts:
        remedy = "the results above list what is missing; --device cpu tests without the card"
        return result("train step", f"{where}: {answer.problem}", remedy, is_wanted=True)
    times = f"first {facts['first_s']:.1f} s, then {facts['step_s']:.2f} s"
    spent = time.perf_counter() - start
    return result("train step", f"{where}; ResNet-18, 1 image: {times}; {spent:.1f} s in all")


def _without_job() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith(JOB_PREFIXES)
    }


SELF_TESTS = (
    ("two ranks average a tensor", _ranks),
    ("a training step on --device {}", _step),
)


def to_text(
    checks: Sequence[Check],
    width: int,
    next_command: str,
    paint: Paint,
    *,
    verbose: bool,
    marks: Mapping[str, str],
) -> str:
    """Return the verdict and the checks, with their headings if `verbose`.

    Lines have `width` columns; paths are not broken and may be longer. If nothing failed, the
    verdict suggests `next_command`.
    """
    is_ready = all(check.state != FAIL for check in checks)
    lines = [paint(_verdict(checks, next_command), STYLES[OK if is_ready else FAIL]), ""]
    shown = [
        check
        for check in checks
        if verbose or check.remedy or check.group in REQUESTED
        or (check.state == OK and check.name in BASIC)
    ]  # fmt: skip
    lines += _table(shown, width, paint, marks, has_headings=verbose)
    if absent := [c.name for c in checks if c.state == ABSENT and c not in shown]:
        text = f"{marks[ABSENT]} not here, optional: {', '.join(absent)}"
        lines += [paint("  " + line, "dim") for line in _wrapped(text, width - 2)]
    if hidden := len(checks) - len(shown):
        lines += ["", f"{hidden} more checks: ssdctl doctor -v"]
    return "\n".join(lines).rstrip("\n")


def problems(checks: Sequence[Check], width: int, paint: Paint) -> str:
    """Return only warnings and failures."""
    wrong = [check for check in checks if check.state in (WARN, FAIL)]
    return "\n".join(_table(wrong, width, paint, ASCII_MARKS))


def _verdict(checks: Sequence[Check], next_command: str) -> str:
    """Return one sentence: whether this machine can train, on what, and what to run next."""
    failures = [check.name for check in checks if check.state == FAIL]
    warnings = sum(check.state == WARN for check in checks)
    counted = f"{warnings} warning{'s' * (warnings != 1)}"
    if failures:
        return f"Not ready: {', '.join(failures)}" + (f" ({counted})" if warnings else "")
    by_name = {check.name: check for check in checks}
    usable = [by_name[n] for n in ACCELERATORS if n in by_name and by_name[n].state == OK]
    cores = by_name["cores"].detail.partition(" ")[0] if "cores" in by_name else "?"
    is_native = "cpu" in by_name and "bf16 native" in by_name["cpu"].detail
    device = f"the CPU ({cores} cores, {'bf16' if is_native else 'fp32'})"
    if usable:
        device = usable[0].detail.partition(";")[0]
    return f"Ready to train on {device}{f', {counted}' if warnings else ''}. Try: {next_command}"


def _table(
    checks: Sequence[Check],
    width: int,
    paint: Paint,
    marks: Mapping[str, str],
    *,
    has_headings: bool = False,
) -> list[str]:
    names = max((len(check.name) for check in checks), default=0)
    indent = names + 6
    lines: list[str] = []
    for group, members in groupby(checks, lambda check: check.group if has_headings else ""):
        lines += [paint(group, "bold")] if has_headings else []
        for check in members:
            first, *more = _wrapped(check.detail, width - indent)
            mark = paint(marks[check.state], STYLES[check.state])
            lines.append(f"  {mark} {check.name:<{names}}  {first}")
            if check.remedy:
                what, *rest = _wrapped(check.remedy, width - indent - 3)
                more += [f"-> {what}", *(f"   {line}" for line in rest)]
            lines += [" " * indent + line for line in more]
        lines += [""] if has_headings else []
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap text without breaking paths and commands, so that they can be copied."""
    width = max(width, 12)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]
