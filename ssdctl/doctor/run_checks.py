"""Run all checks in parallel and return their results in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as Late
from functools import partial

from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, WARN, CheckResult, redacted
from ssdctl.doctor.devices import check_cpu, check_gpus, check_tpus
from ssdctl.doctor.gaudi import check_gaudi
from ssdctl.doctor.hardware import find_hardware
from ssdctl.doctor.launchers import check_launchers
from ssdctl.doctor.limits import check_limits
from ssdctl.doctor.machine import check_machine
from ssdctl.doctor.software import check_software
from ssdctl.doctor.subprocess_probe import IMPORT_S, ProbeRunner
from ssdctl.runtime.background import run_in_daemon_thread
from ssdctl.runtime.packages import library_error

PATIENCE_S = 2 * IMPORT_S + 30  # for one heading; longer than the timeouts of the probes
DEVICES, MACHINE = "Devices", "Machine"
CheckFunction = Callable[[], list[CheckResult]]


def examine(
    config: Config,
    *,
    network: bool = False,
    self_test: bool = False,
) -> list[CheckResult]:
    """Check this machine without importing torch into this process.

    Args:
        config: Its dataset, device, weights and launcher are checked.
        network: Also check the download hosts.
        self_test: Also write to the disk, join two ranks and train a step.

    Returns:
        The results in display order, grouped by heading, without secrets.
    """
    runner = ProbeRunner()
    try:
        results = _check_all(config, runner, network)
        if self_test:
            from ssdctl.doctor.self_test import self_test as run

            results += [c._replace(group="Self-test") for c in run(config, runner)]
    finally:
        runner.stop()
    return redacted(results)


def _check_all(config: Config, runner: ProbeRunner, network: bool) -> list[CheckResult]:
    torch = run_in_daemon_thread(partial(runner.run_probe, "torch", IMPORT_S))
    pci = find_hardware()
    checks: list[tuple[str, CheckFunction]] = [
        ("Python", partial(check_software, config, torch)),
        (DEVICES, partial(check_cpu, torch)),
        (DEVICES, partial(check_gpus, config, runner, pci, torch)),
        (DEVICES, partial(check_gaudi, config, runner, pci)),
        (DEVICES, partial(check_tpus, config, runner)),
        (MACHINE, check_machine),
        (MACHINE, partial(check_limits, pci)),
        ("Launchers", partial(check_launchers, config, runner, pci)),
        ("Data", partial(_check_data, config)),
    ]
    if network:
        from ssdctl.doctor.network import check_network

        checks.append(("Network", partial(check_network, config)))
    started = [
        (group, run_in_daemon_thread(partial(_run, group, check))) for group, check in checks
    ]
    results = []
    for group, future in started:
        try:
            answers = future.result(PATIENCE_S)
        except Late:
            remedy = "a file system or a driver hangs: see dmesg"
            answers = [
                CheckResult(group.lower(), WARN, f"no answer within {PATIENCE_S:g} s", remedy)
            ]
        results += [check._replace(group=group) for check in answers]
    return results


def _check_data(config: Config) -> list[CheckResult]:
    from ssdctl.doctor.data import check_data  # imports numpy, whose libraries may be broken

    return check_data(config)


def _run(group: str, check: CheckFunction) -> list[CheckResult]:
    """Run a check; return a problem if it cannot load a package or read a file."""
    try:
        return check()
    except (ImportError, OSError) as error:
        if (problem := library_error(error)) is not None:
            return [CheckResult(group.lower(), FAIL, str(problem), problem.hint or "")]
        if not isinstance(error, OSError):
            raise
        detail = f"cannot be read: {error.strerror or error}: {error.filename or ''}"
        return [CheckResult(group.lower(), WARN, detail.rstrip(": "), "check its permissions")]
