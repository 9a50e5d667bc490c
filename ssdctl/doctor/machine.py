"""Check Python and its packages, cores, memory, and the launchers' programs."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata

from packaging.requirements import Requirement

from ssdctl._version import __version__
from ssdctl.config import Config
from ssdctl.doctor import IMPORT_S, Check, Doctor, absent, result
from ssdctl.runtime import hardware, plugins, system
from ssdctl.runtime.packages import dali_extra, package_version
from ssdctl.runtime.threads import run_in_daemon_thread

OWN_LINE = ("torch", "torchvision")  # the others share one line
PURPOSES = {
    dali_extra(): "--pipeline dali",
    "tpu": "--device tpu",
    "tpu-xla": "--device xla",
    "onnx": "export --format onnx",
    "export": "export --format safetensors",
    "tensorboard": "--tensorboard",
    "wandb": "--tracker wandb",
    "mlflow": "--tracker mlflow",
    "hub": "hf:// models, push",
    "video": "predict on videos and cameras",
}
LITTLE_MEMORY = 4 * 2**30
VERSION_S = 15.0
LOGIN = "log in to a node of the cluster, or write the script there: launch --write FILE"
KUBECTL = "install kubectl and log in to the cluster; launch --write FILE needs neither"
# Program and the arguments that print its version, the launcher that needs it, its use, a remedy.
TOOLS = (
    ("mpirun --version", "mpirun", "launch --hpus", "apt-get install openmpi-bin"),
    ("sbatch --version", "slurm", "launch --launcher slurm", LOGIN),
    ("kubectl version --client", "kubernetes", "launch --launcher kubernetes", KUBECTL),
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
        yield from _packages(doctor.config, requirements)
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


def _packages(config: Config, requirements: list[Requirement]) -> Iterator[Check]:
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    results = [_requirement(requirement) for requirement in needed]
    separate = [c for c in results if c.remedy or c.name in OWN_LINE]
    yield from sorted(separate, key=lambda check: bool(check.remedy))
    if rest := ", ".join(f"{c.name} {c.detail}" for c in results if c not in separate):
        yield result("packages", rest)
    yield from _extras(config, [r for r in requirements if r not in needed])


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


def _extras(config: Config, requirements: list[Requirement]) -> Iterator[Check]:
    """Check the optional dependencies; absent ones are problems only if the config needs them."""
    wanted = {*config.train.tracker, *(["tensorboard"] if config.train.tensorboard else [])}
    wanted |= {dali_extra()} if config.train.pipeline == "dali" else set()
    installed, missing = [], []
    for extra, purpose in PURPOSES.items():
        members = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        wrong = [c for c in map(_requirement, members) if c.remedy and c.name != "ssdctl"]
        if not wrong:
            installed.append(extra)
        elif extra in wanted:
            detail = "; ".join(f"{c.name}: {c.detail}" for c in wrong)
            packages = " ".join(c.remedy.removeprefix("pip install ") for c in wrong)
            remedy = f"pip install {packages}, for {purpose}"
            yield result(f"extra {extra}", detail, remedy, is_wanted=True)
        else:
            missing.append(f"{extra} ({purpose})")
    if installed:
        yield result("extras", ", ".join(installed))
    if missing:
        yield absent("other extras", f"not installed: {', '.join(missing)}")


def check_plugins(doctor: Doctor) -> Iterator[Check]:
    """Load the plugins of other packages: a broken one is a problem only when it is used."""
    if not any(map(plugins.plugins, plugins.KINDS)):
        return
    answer = doctor.run_probe("plugins", timeout_s=IMPORT_S)
    if not (facts := answer.facts()):
        yield result("plugins", f"cannot be loaded: {answer.problem}", "uninstall them one by one")
    for name, problem in facts.items():
        option, detail = name.split(" (")
        remedy = "update or uninstall its package" if problem else None
        yield result(option, f"{detail.rstrip(')')}{': ' * bool(problem)}{problem}", remedy)


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


def check_launchers(doctor: Doctor) -> Iterator[Check]:
    outputs = {
        words: run_in_daemon_thread(partial(doctor.run, words.split(), VERSION_S))
        for words, *_ in TOOLS
        if shutil.which(words.split()[0])
    }
    for words, launcher, use, remedy in TOOLS:
        name, is_wanted = words.split()[0], doctor.config.launch.launcher == launcher
        if words not in outputs:
            if name == "mpirun" and doctor.hardware.num_gaudi and not is_wanted:
                yield result(name, f"not found; {use} runs it", remedy)
            else:
                yield absent(name, f"not found; for {use}", remedy, is_wanted=is_wanted)
            continue
        output = outputs[words].result()
        version = output.out.strip().partition("\n")[0].strip()
        if output.problem:
            yield result(name, f"does not answer: {output.problem}", remedy, is_wanted=is_wanted)
        elif name == "mpirun" and not re.search("open ?mpi|openrte|prrte", version, re.IGNORECASE):
            remedy = f"ssdctl writes Open MPI's options; put its mpirun first on PATH ({remedy})"
            yield result(name, f"{version}: not Open MPI's", remedy, is_wanted=is_wanted)
        else:
            yield result(name, version or "found")
