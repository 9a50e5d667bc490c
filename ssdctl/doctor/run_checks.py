"""Ask everybody, side by side, and put the answers in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as Late
from functools import partial

from ssdctl.config import Config
from ssdctl.doctor.check import WARN, Check, redacted
from ssdctl.doctor.data import check_data
from ssdctl.doctor.devices import check_cpu, check_gpus, check_tpus
from ssdctl.doctor.gaudi import check_gaudi
from ssdctl.doctor.hardware import find_hardware
from ssdctl.doctor.launchers import check_launchers
from ssdctl.doctor.limits import check_limits
from ssdctl.doctor.machine import check_machine
from ssdctl.doctor.software import check_software
from ssdctl.doctor.subprocess_probe import IMPORT_S, Asker
from ssdctl.runtime.background import run_in_daemon_thread

PATIENCE_S = 2 * IMPORT_S + 30  # for a heading; the probes give up before
DEVICES, MACHINE = "Devices", "Machine"
Look = Callable[[], list[Check]]


def examine(
    config: Config,
    *,
    network: bool = False,
    self_test: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> list[Check]:
    """Look at this machine, without importing torch into this process.

    Args:
        config: Names the dataset, the device, the weights, the launcher.
        network: Ask the download hosts too.
        self_test: Write to the disk, join two ranks and train a step too.
        say: Told what takes a while.

    Returns:
        The checks in the order in which they are shown, by heading; without secrets.
    """
    asker = Asker()
    try:
        found = _look(config, asker, network)
        if self_test:
            from ssdctl.doctor.self_test import self_test as run

            found += [c._replace(group="Self-test") for c in run(config, asker, say)]
    finally:
        asker.stop()
    return redacted(found)


def _look(config: Config, asker: Asker, network: bool) -> list[Check]:
    torch = run_in_daemon_thread(partial(asker.ask_probe, "torch", IMPORT_S))
    pci = find_hardware()
    looks: list[tuple[str, Look]] = [
        ("Python", partial(check_software, config, torch)),
        (DEVICES, partial(check_cpu, torch)),
        (DEVICES, partial(check_gpus, config, asker, pci, torch)),
        (DEVICES, partial(check_gaudi, config, asker, pci)),
        (DEVICES, partial(check_tpus, config, asker)),
        (MACHINE, check_machine),
        (MACHINE, partial(check_limits, pci)),
        ("Launchers", partial(check_launchers, config, asker, pci)),
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
            answers = [Check(group.lower(), WARN, f"no answer within {PATIENCE_S:g} s", remedy)]
        found += [check._replace(group=group) for check in answers]
    return found


def _guarded(group: str, look: Look) -> list[Check]:
    """What cannot be read is a line too."""
    try:
        return look()
    except OSError as error:
        detail = f"cannot be looked at: {error.strerror or error}: {error.filename or ''}"
        return [Check(group.lower(), WARN, detail.rstrip(": "), "see its permissions")]
