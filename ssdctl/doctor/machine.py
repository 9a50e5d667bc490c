"""Check Python and its packages, cores and memory, and GPUs, Gaudi cards and TPUs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from ssdctl._version import __version__
from ssdctl.doctor import DRIVER_S, IMPORT_S, Check, Doctor, absent, result
from ssdctl.runtime import hardware, plugins, system
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.system import read_table, read_text, run_in_daemon_thread

OWN_LINE = ("torch", "torchvision")  # the others share one line
LITTLE_MEMORY = 4 * 2**30
CPU_REMEDY = "--device cpu trains without it"
# The oldest driver for a torch of this CUDA, by NVIDIA's notes on minor-version compatibility.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
BRIDGE, BRIDGE_PACKAGE = "habana_frameworks", "habana-torch-plugin"
IMAGE = "run in the vendor's PyTorch image for Gaudi: its torch and bridge match"
# Pages of 2 MiB. Voyager's pods get 95,000 MiB for eight cards; the 153,600 pages of Habana's
# TensorFlow guide also hold that framework's dataset cache, which ssdctl does not have.
HUGE_PAGES_PER_CARD = 5_937
# Package, program that counts its devices, remedy.
XLA = (
    "torch_xla",
    "import torch_xla.runtime as r; print(r.global_runtime_device_count(), 'x', r.device_type())",
    "pip install 'torch_xla[tpu]==2.9.*' 'torch==2.9.*'; one process at a time can hold a chip",
)
TORCH_TPU = (
    "torch_tpu",
    "import torch, torch_tpu; print(torch.accelerator.device_count(), 'x TPU')",
    "pip install torch_tpu with torch 2.11 to 2.15; one process at a time can hold a chip",
)


def check_software(doctor: Doctor) -> Iterator[Check]:
    """Yield the results for Python, the packages and the import of torch."""
    yield result("ssdctl", f"{__version__} on {platform.platform()}")
    yield result("python", f"{platform.python_version()} ({sys.executable})")
    try:
        requirements = [Requirement(text) for text in metadata.requires("ssdctl") or []]
    except metadata.PackageNotFoundError:
        remedy = "install it: pip install -e . in its folder, or pip install of its wheel"
        yield result("packages", "ssdctl runs without being installed", remedy)
    else:
        yield from _packages(requirements)
    torch = doctor.torch.result()
    facts = torch.facts()
    if "cpu" not in facts:
        remedy = "pip install --force-reinstall torch torchvision"
        yield result("torch import", f"fails: {torch.problem}", remedy, is_wanted=True)
    elif facts["has_gloo"]:
        yield result("torch import", f"{facts['import_s']:.1f} s")
    else:
        remedy = "several ranks need it: install PyTorch's own build"
        yield result("torch import", f"{facts['import_s']:.1f} s; built without gloo", remedy)


def _packages(requirements: list[Requirement]) -> Iterator[Check]:
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    results = [_requirement(requirement) for requirement in needed]
    separate = [c for c in results if c.remedy or c.name in OWN_LINE]
    yield from sorted(separate, key=lambda check: bool(check.remedy))
    if rest := ", ".join(f"{c.name} {c.detail}" for c in results if c not in separate):
        yield result("packages", rest)


def _requirement(requirement: Requirement) -> Check:
    name, specifier = requirement.name, str(requirement.specifier)
    version = package_version(name)
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return result(name, version)
    remedy = f"pip install '{name}{specifier}'"
    if name in OWN_LINE and importlib.util.find_spec("habana_frameworks") is not None:
        remedy = "it is part of the vendor's image: use a newer image"
    detail = f"{version or 'not installed'}; ssdctl needs {specifier}"
    return result(name, detail, remedy, is_wanted=True)


def check_plugins(doctor: Doctor) -> Iterator[Check]:
    """Load the plugins of other packages: a broken one is a problem only when it is used."""
    found = [plugin for kind in plugins.KINDS for plugin in plugins.plugins(kind)]
    answers = [
        run_in_daemon_thread(
            partial(doctor.run_probe, "plugin", p.kind.group, p.name, timeout_s=IMPORT_S)
        )
        for p in found
    ]
    for plugin, answer in zip(found, answers, strict=True):
        output = answer.result()
        ended = output.problem or "it ends the process"
        problem = output.facts().get("problem", ended).removeprefix(f"{plugin}: ")
        remedy = "update or uninstall its package" if problem else None
        option, detail = str(plugin).removesuffix(")").split(" (")
        yield result(option, f"{detail}{': ' * bool(problem)}{problem}", remedy)


def check_machine(_: Doctor) -> Iterator[Check]:
    yield _cores()
    yield _memory()


def _cores() -> Check:
    cpus = system.usable_cpus()
    cores, has_topology = system.physical_cores(cpus, hardware.SYS / "devices/system/cpu")
    detail = f"{len(cpus)} usable of {os.cpu_count()}"
    if has_topology:
        sockets = len({socket for socket, _ in cores})
        numa = len(list((hardware.SYS / "devices/system/node").glob("node[0-9]*"))) or 1
        detail += f": {len(cores)} physical on {sockets} socket(s), {numa} NUMA node(s)"
    else:
        detail += ", without topology (a VM): mpirun maps ranks by slot"
    quota = system.cpu_quota(hardware.PROC, hardware.SYS)
    if quota is not None and quota < len(cpus):
        detail += f"; the cgroup grants {quota:g}"
    return result("cores", detail)


def _memory() -> Check:
    table = system.read_table(hardware.PROC / "meminfo")
    total, available = (system.table_bytes(table, name) for name in ("MemTotal", "MemAvailable"))
    limit = system.memory_limit(hardware.PROC, hardware.SYS)
    detail = f"{available / 2**30:.0f} GiB available of {total / 2**30:.0f}"
    if limit is not None and limit < total:
        detail += f"; the cgroup grants {limit / 2**30:.1f} GiB"
        available = min(available, limit)
    remedy = "end other programs or raise the limit; a smaller --bs needs less"
    return result("memory", detail, remedy if available < LITTLE_MEMORY else None)


def check_cpu(doctor: Doctor) -> Iterator[Check]:
    if (cpu := doctor.torch.result().facts().get("cpu")) is None:
        return
    native = "bf16 native" if cpu["has_native_bf16"] else "bf16 works but slowly: prefer --fp32"
    yield result("cpu", f"{cpu['label']}; fp32, {native}; no fp16")


def check_gpus(doctor: Doctor) -> Iterator[Check]:
    """Query NVIDIA's driver while torch is being imported, then check what torch detects."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    smi = doctor.run(query, DRIVER_S)
    drivers = [] if smi.problem else smi.out.split()  # one per GPU
    driver, torch = drivers[0] if drivers else "", doctor.torch.result()
    facts = torch.facts()
    if facts.get("gpus"):
        yield from _usable_gpus(facts, driver)
        return
    is_wanted = doctor.config.train.device == "cuda"
    reason = facts.get("gpu_problem") or "torch could not be queried"
    died = "cuda_build" in facts and torch.problem  # while it looked for GPUs
    if died:
        reason = f"looking for GPUs: {died}"
    num_gpus = doctor.hardware.num_nvidia
    if not num_gpus and not driver and not died:
        detail = f"no GPU: {reason}" if is_wanted else "no GPU"
        yield absent("cuda", detail, CPU_REMEDY, is_wanted=is_wanted)
        return
    # A card that torch cannot use: `--device auto` would silently train on the CPU.
    num_gpus = num_gpus or len(drivers)
    detail = f"{num_gpus} GPU(s)" if num_gpus else "GPUs, if any"
    detail += f", not usable by torch: {reason}; "
    detail += f"driver {driver}" if driver else f"nvidia-smi: {smi.problem}"
    remedy = "nvidia-smi must list the card: install or reload NVIDIA's driver"
    if "cuda_build" in facts and facts["cuda_build"] is None:
        remedy = "install a torch that is built for CUDA: pip install --force-reinstall torch"
    elif driver:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for torch's CUDA"
        remedy = _too_old(driver, facts.get("cuda_build")) or remedy
    yield result("cuda", detail, remedy, is_wanted=is_wanted)


def _too_old(driver: str, cuda: str | None) -> str | None:
    """Return the remedy for a driver that is older than torch's CUDA needs, else None."""
    needed = OLDEST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    numbers = re.match(r"(\d+)\.(\d+)", driver)
    if needed is None or numbers is None or (int(numbers[1]), int(numbers[2])) >= needed:
        return None
    return f"torch's CUDA {cuda} needs driver {needed[0]}.{needed[1]} or newer: update it"


def _usable_gpus(facts: dict[str, Any], driver: str) -> Iterator[Check]:
    gpus, cuda = facts["gpus"], facts["cuda_build"]
    names = Counter(
        f"{g['name']} ({g['memory_bytes'] / 2**30:.0f} GiB, compute "
        f"{g['capability'][0]}.{g['capability'][1]})"
        for g in gpus
    )
    detail = ", ".join(f"{count} x {name}" for name, count in names.items())
    detail += f"; torch's CUDA {cuda}" + (f", driver {driver}" if driver else "")
    if all(g["has_kernels"] for g in gpus):
        yield result("cuda", detail, _too_old(driver, cuda))
    else:
        detail += "; this torch has no kernels for them"
        remedy = f"install a torch built for them (an older one for old cards); {CPU_REMEDY}"
        yield result("cuda", detail, remedy, is_wanted=True)


def check_gaudi(doctor: Doctor) -> Iterator[Check]:
    """Query hl-smi, then import the bridge in a subprocess."""
    smi = doctor.run(["hl-smi", "-Q", "name,driver_version", "-f", "csv,noheader"], DRIVER_S)
    lines = [line.split(",") for line in smi.out.splitlines() if line.count(",") == 1]
    cards = [[field.strip() for field in line] for line in lines if not smi.problem]
    problem = "" if cards else f"hl-smi: {smi.problem or 'it lists no card'}"
    num_cards, device = len(cards) or doctor.hardware.num_gaudi, doctor.config.train.device
    is_wanted = device == "hpu"
    driver = cards[0][1] if cards else read_text(hardware.SYS / "module/habanalabs/version")
    has_bridge = importlib.util.find_spec(BRIDGE) is not None
    bridge = (package_version(BRIDGE_PACKAGE) or "unknown") if has_bridge else "absent"
    names = Counter(name for name, _ in cards) or {"Gaudi": num_cards}
    detail = ", ".join(f"{number} x {name}" for name, number in names.items())
    detail += f", driver {driver or 'unknown'}, bridge {bridge}"
    if not num_cards and not has_bridge:
        yield absent("hpu", "no Gaudi card, no bridge", IMAGE, is_wanted=is_wanted)
    elif not num_cards:
        detail = f"bridge {bridge}, but no card: {problem}"
        is_auto = device == "auto"  # chosen by the bridge
        detail += "; --device auto would choose it and fail" if is_auto else ""
        remedy = "hl-smi must list the cards: load the driver habanalabs; or --device cpu"
        yield result("hpu", detail, remedy, is_wanted=is_auto or is_wanted)
    elif not has_bridge:
        yield result("hpu", detail, IMAGE, is_wanted=is_wanted)
    else:
        yield _releases(detail, driver, bridge, problem)
        imported = doctor.run_python("-c", f"import {BRIDGE}.torch.core", timeout_s=IMPORT_S)
        if imported.problem:
            detail = f"cannot be imported: {imported.problem}"
            yield result("hpu bridge", detail, IMAGE, is_wanted=is_wanted)
    yield _huge_pages(num_cards)


def _releases(detail: str, driver: str, bridge: str, problem: str) -> Check:
    has, needs = (re.match(r"\d+\.\d+", version) for version in (driver, bridge))
    if has and needs and has[0] != needs[0]:
        remedy = f"use the vendor's image of release {has[0]}, or update the driver to {needs[0]}"
        return result("hpu", f"{detail}: the releases do not match", remedy)
    if problem:
        remedy = "hl-smi comes with the vendor's driver; in a container, mount it or use its image"
        return result("hpu", f"{detail}; {problem}", remedy)
    return result("hpu", detail)


def _huge_pages(num_cards: int) -> Check:
    table = read_table(hardware.PROC / "meminfo")
    pages = int(table.get("HugePages_Total") or 0)
    detail = f"{pages:,} of {table.get('Hugepagesize', '?')}"
    if not num_cards:
        return absent("huge pages", f"{detail}; not needed without Gaudi cards")
    advised = HUGE_PAGES_PER_CARD * num_cards
    if pages >= advised:
        return result("huge pages", detail)
    remedy = (
        "sudo cp /etc/sysctl.conf /etc/sysctl.conf.bak; set vm.nr_hugepages = "
        f"{advised} in /etc/sysctl.conf; sudo sysctl -p; after training: sudo mv "
        "/etc/sysctl.conf.bak /etc/sysctl.conf; sudo sysctl -p. Too few end in 'Error mapping "
        f"memory'. Kubernetes pods request hugepages-2Mi={2 * advised}Mi instead"
    )
    return result("huge pages", f"{detail}; {advised:,} are recommended (Voyager's number)", remedy)


def check_tpus(doctor: Doctor) -> Iterator[Check]:
    """Check that TorchTPU, or torch_xla for older chips, detects the chips."""
    chips, device = doctor.hardware.tpus, doctor.config.train.device
    counted = ", ".join(f"{n} x {chip.name}" for chip, n in Counter(chips).items())
    detail, is_wanted = f"{counted or 'no TPU'} on the PCI bus", device in ("tpu", "xla")
    has_tpu, has_xla = (importlib.util.find_spec(n) is not None for n in ("torch_tpu", "torch_xla"))
    needs_xla = device == "xla" or any(chip.has_two_cores for chip in chips)
    uses_xla = needs_xla or (has_xla and not has_tpu)
    package, program, remedy = XLA if uses_xla else TORCH_TPU
    if not chips and not is_wanted:
        yield absent("tpu", detail)
    elif not (has_xla if uses_xla else has_tpu):
        report = result if chips else absent
        yield report("tpu", f"{detail}; no {package}", remedy, is_wanted=is_wanted)
    else:
        detail += f"; {package} {package_version(package)} with torch {package_version('torch')}"
        output = doctor.run_python("-c", program, timeout_s=IMPORT_S)
        if output.problem:
            yield result("tpu", f"{detail}: {output.problem}", remedy, is_wanted=is_wanted)
        else:
            yield result("tpu", f"{output.out.strip()}, {detail}; fp32, bf16 native")
