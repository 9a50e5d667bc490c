"""Run all checks in parallel and return their results in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as Late
from functools import partial

from ssdctl.config import Config
from ssdctl.doctor.check import WARN, CheckResult, redacted
from ssdctl.doctor.data import check_data
from ssdctl.doctor.devices import check_cpu, check_gpus, check_tpus
from ssdctl.doctor.gaudi import check_gaudi
from ssdctl.doctor.hardware import find_hardware
from ssdctl.doctor.launchers import check_launchers
from ssdctl.doctor.limits import check_limits
from ssdctl.doctor.machine import check_machine
from ssdctl.doctor.software import check_software
from ssdctl.doctor.subprocess_probe import IMPORT_S, ProbeRunner
from ssdctl.runtime.background import run_in_daemon_thread

PATIENCE_S = 2 * IMPORT_S + 30  # for a heading; the probes give up before
DEVICES, MACHINE = "Devices", "Machine"
Look = Callable[[], list[CheckResult]]


def examine(
    config: Config,
    *,
    network: bool = False,
    self_test: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[CheckResult]:
    """Look at this machine, without importing torch into this process.

    Args:
        config: Names the dataset, the device, the weights, the launcher.
        network: Ask the download hosts too.
        self_test: Write to the disk, join two ranks and train a step too.
        say: Told what takes a while.

    Returns:
        The checks in the order in which they are shown, by heading; without secrets.
    """
    runner = ProbeRunner()
    try:
        found = _look(config, runner, network)
        if self_test:
            from ssdctl.doctor.self_test import self_test as run

            found += [c._replace(group="Self-test") for c in run(config, runner, say)]
    finally:
        runner.stop()
    return redacted(found)


def _look(config: Config, runner: ProbeRunner, network: bool) -> list[CheckResult]:
    torch = run_in_daemon_thread(partial(runner.run_probe, "torch", IMPORT_S))
    pci = find_hardware()
    looks: list[tuple[str, Look]] = [
        ("Python", partial(check_software, config, torch)),
        (DEVICES, partial(check_cpu, torch)),
        (DEVICES, partial(check_gpus, config, runner, pci, torch)),
        (DEVICES, partial(check_gaudi, config, runner, pci)),
        (DEVICES, partial(check_tpus, config, runner)),
        (MACHINE, check_machine),
        (MACHINE, partial(check_limits, pci)),
        ("Launchers", partial(check_launchers, config, runner, pci)),
        ("Data", partial(check_data, config)),
    ]
    if network:
        from ssdctl.doctor.network import check_network

        looks.append(("Network", partial(check_network, config)))
    begun = [(group, run_in_daemon_thread(partial(_guarded, group, look))) for group, look in looks]
    found = []
    for group, checks in begun:
        try:
            answers = checks.result(PATIENCE_S)
        except Late:
            remedy = "a file system or a driver hangs: see dmesg"
            answers = [
                CheckResult(group.lower(), WARN, f"no answer within {PATIENCE_S:g} s", remedy)
            ]
        found += [check._replace(group=group) for check in answers]
    return found


def _guarded(group: str, look: Look) -> list[CheckResult]:
    """Return a warning for a check that cannot read what it needs."""
    try:
        return look()
    except OSError as error:
        detail = f"cannot be looked at: {error.strerror or error}: {error.filename or ''}"
        return [CheckResult(group.lower(), WARN, detail.rstrip(": "), "see its permissions")]
