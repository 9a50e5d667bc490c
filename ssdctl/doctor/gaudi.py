"""Check Gaudi cards: driver, bridge, whether their releases match, huge pages, batch size."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from typing import NamedTuple

from ssdctl.config import Config
from ssdctl.doctor import hardware
from ssdctl.doctor.check import ABSENT, FAIL, OK, WARN, CheckResult, absent
from ssdctl.doctor.hardware import Hardware
from ssdctl.doctor.subprocess_probe import DRIVER_S, ProbeRunner
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.system import read_table

BRIDGE, BRIDGE_PACKAGE = "habana_frameworks", "habana-torch-plugin"
IMAGE = "run in the vendor's PyTorch image for Gaudi: its torch and bridge match"
GAUDI2 = re.compile(r"HL-2[2-9]")  # HL-225 and similar; HL-20x is the first Gaudi, HL-3xx the third
GAUDI2_BATCH = 24
# Pages of 2 MiB. Voyager's pods get 95,000 MiB for eight cards; the 153,600 pages of Habana's
# TensorFlow guide also hold that framework's dataset cache, which ssdctl does not have.
HUGE_PAGES_PER_CARD = 5_937


class Driver(NamedTuple):
    """What the driver's own tool reports, or the kernel if the tool is absent."""

    cards: list[str]  # names
    version: str
    problem: str


def check_gaudi(config: Config, runner: ProbeRunner, pci: Hardware) -> list[CheckResult]:
    """Query hl-smi, then import the bridge in a subprocess."""
    driver, bridge = _query_driver(runner), _bridge_version()
    num_cards = len(driver.cards) or pci.num_gaudi
    return [*_cards(config, runner, num_cards, driver, bridge), _huge_pages(num_cards)]


def _cards(
    config: Config, runner: ProbeRunner, num_cards: int, driver: Driver, bridge: str | None
) -> list[CheckResult]:
    device = config.train.device
    trouble = FAIL if device == "hpu" else WARN
    if not num_cards and bridge is None:
        return [absent("hpu", "no Gaudi card, no bridge", IMAGE, is_wanted=device == "hpu")]
    if not num_cards:
        detail = f"bridge {bridge}, but no card: {driver.problem}"
        if device == "auto":  # chosen by the bridge
            trouble, detail = FAIL, f"{detail}; --device auto would choose it and fail"
        remedy = "hl-smi must list the cards: load the driver habanalabs; or --device cpu"
        return [CheckResult("hpu", trouble, detail, remedy)]
    names = Counter(driver.cards) or {"Gaudi": num_cards}
    detail = ", ".join(f"{number} x {name}" for name, number in names.items())
    detail += f", driver {driver.version or 'unknown'}, bridge {bridge or 'absent'}"
    if bridge is None:
        return [CheckResult("hpu", trouble, detail, IMAGE)]
    return [
        _releases(detail, driver, bridge),
        *_import_bridge(runner, trouble),
        CheckResult("hpu precision", OK, "fp32, bf16 native; no fp16"),
        *_batch(config, driver.cards),
    ]


def _query_driver(runner: ProbeRunner) -> Driver:
    loaded = hardware.read(hardware.SYS / "module/habanalabs/version")
    if shutil.which("hl-smi") is None:
        return Driver([], loaded, "hl-smi is not on PATH")
    answer = runner.run(["hl-smi", "-Q", "name,driver_version", "-f", "csv,noheader"], DRIVER_S)
    if answer.problem:
        return Driver([], loaded, f"hl-smi: {answer.problem}")
    rows = [line.split(",") for line in answer.out.splitlines() if line.count(",") == 1]
    if not rows:
        return Driver([], loaded, "hl-smi lists no card")
    return Driver([name.strip() for name, _ in rows], rows[0][1].strip(), "")


def _bridge_version() -> str | None:
    """Return the bridge's version, `unknown` without package metadata; None if it is absent."""
    if importlib.util.find_spec(BRIDGE) is None:
        return None
    return package_version(BRIDGE_PACKAGE) or "unknown"


def _releases(detail: str, driver: Driver, bridge: str) -> CheckResult:
    """Check that driver and bridge are of the same release."""
    has, needs = _release(driver.version), _release(bridge)
    if has and needs and has != needs:
        remedy = f"use the vendor's image of release {has}, or update the driver to {needs}"
        return CheckResult("hpu", WARN, f"{detail}: the releases do not match", remedy)
    if driver.problem:
        remedy = "hl-smi comes with the vendor's driver; in a container, mount it or use its image"
        return CheckResult("hpu", WARN, f"{detail}; {driver.problem}", remedy)
    return CheckResult("hpu", OK, detail)


def _release(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def _import_bridge(runner: ProbeRunner, trouble: str) -> list[CheckResult]:
    answer = runner.run_python(f"import {BRIDGE}.torch.core")
    if not answer.problem:
        return []
    return [CheckResult("hpu bridge", trouble, f"cannot be imported: {answer.problem}", IMAGE)]


def _batch(config: Config, cards: list[str]) -> list[CheckResult]:
    """Suggest a faster batch size for Gaudi2."""
    size = config.train.batch_size
    if not any(map(GAUDI2.match, cards)) or size == "auto" or size % GAUDI2_BATCH == 0:
        return []
    below = size - size % GAUDI2_BATCH
    hint = " or ".join(f"--bs {n}" for n in (below, below + GAUDI2_BATCH) if n)
    detail = f"{size} a device; Gaudi2 is faster at multiples of {GAUDI2_BATCH}"
    return [CheckResult("hpu batch", OK, detail, hint)]


def _huge_pages(num_cards: int) -> CheckResult:
    table = read_table(hardware.PROC / "meminfo")
    pages = int(table.get("HugePages_Total") or 0)
    detail = f"{pages:,} of {table.get('Hugepagesize', '?')}"
    if not num_cards:
        return CheckResult("huge pages", ABSENT, f"{detail}; not needed without Gaudi cards")
    needed = HUGE_PAGES_PER_CARD * num_cards
    if pages < needed:
        remedy = (
            "sudo cp /etc/sysctl.conf /etc/sysctl.conf.bak; set vm.nr_hugepages = "
            f"{needed} in /etc/sysctl.conf; sudo sysctl -p; after training: sudo mv "
            "/etc/sysctl.conf.bak /etc/sysctl.conf; sudo sysctl -p. Too few end in 'Error mapping "
            f"memory'. Kubernetes pods request hugepages-2Mi={2 * needed}Mi instead"
        )
        return CheckResult("huge pages", WARN, f"{detail}, {needed:,} needed", remedy)
    return CheckResult("huge pages", OK, detail)
