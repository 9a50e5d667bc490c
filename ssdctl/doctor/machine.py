"""Check Python and its packages, cores, memory, limits, adapters, and the launchers' programs."""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from ssdctl._version import __version__
from ssdctl.config import Config
from ssdctl.doctor.check import ABSENT, OK, Check, ProgramOutput, Programs, absent, bad, ok
from ssdctl.launch.node import read_node
from ssdctl.runtime import hardware
from ssdctl.runtime.background import run_in_daemon_thread
from ssdctl.runtime.cgroups import cpu_quota, memory_limit
from ssdctl.runtime.hardware import Hardware
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.system import UNLIMITED, read_table, resource_limit, table_bytes, usable_cpus
from ssdctl.runtime.torch_compat import dali_extra

NEWEST_PYTHON = (3, 13)  # that the tests run on
OWN_LINE = ("torch", "torchvision")  # the others share one line
PURPOSES = {
    dali_extra(): "--pipeline dali",
    "tpu": "--device xla",
    "onnx": "export --format onnx",
    "export": "export --format safetensors",
    "tensorboard": "--tensorboard",
    "wandb": "--tracker wandb",
    "mlflow": "--tracker mlflow",
    "hub": "hf:// models, push",
    "video": "predict on videos and cameras",
}
LITTLE_MEMORY = 4 * 2**30
SHM = Path("/dev/shm")
SHM_WANTED = 2**30  # what collectives between the cards of a node need, with a margin
FILES_WANTED = 4096  # shards, connections, logs; a connection or two per rank
FILES_NEEDED = 1024
VERSION_S = 15.0


def check_software(config: Config, torch: Future[ProgramOutput]) -> list[Check]:
    """Return the results for Python, the packages and the import of torch."""
    python = f"{platform.python_version()} ({sys.executable})"
    results = [ok("ssdctl", f"{__version__} on {platform.platform()}"), ok("python", python)]
    if sys.version_info[:2] > NEWEST_PYTHON:
        remedy = f"use Python {'.'.join(map(str, NEWEST_PYTHON))}"
        results[1] = bad("python", f"{python}: newer than tested", remedy)
    results += _packages(config)
    facts = torch.result().facts()
    if "cpu" not in facts:
        remedy = "pip install --force-reinstall torch torchvision"
        detail = f"fails: {torch.result().problem}"
        return [*results, bad("torch import", detail, remedy, is_wanted=True)]
    detail = f"{facts['import_s']:.1f} s"
    if not facts["has_gloo"]:
        remedy = "several ranks need it: install PyTorch's own build"
        return [*results, bad("torch import", f"{detail}; built without gloo", remedy)]
    return [*results, ok("torch import", detail)]


def _packages(config: Config) -> list[Check]:
    try:
        texts = metadata.requires("ssdctl") or []
    except metadata.PackageNotFoundError:
        remedy = "install it: pip install -e . in its folder, or pip install of its wheel"
        return [bad("packages", "ssdctl runs without being installed", remedy)]
    requirements = [Requirement(text) for text in texts]
    needed = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    results = [_check_requirement(requirement) for requirement in needed]
    separate = [c for c in results if c.state != OK or c.name in OWN_LINE]
    separate.sort(key=lambda check: check.state != OK)
    rest = ", ".join(f"{c.name} {c.detail}" for c in results if c not in separate)
    extras = _extras(config, [r for r in requirements if r not in needed], {r.name for r in needed})
    return [*separate, *([ok("packages", rest)] if rest else []), *_torchvision(), *extras]


def _check_requirement(requirement: Requirement) -> Check:
    name, specifier = requirement.name, str(requirement.specifier)
    remedy = f"pip install '{requirement.name}{specifier}'"
    if name in OWN_LINE and importlib.util.find_spec("habana_frameworks") is not None:
        remedy = "it is part of the vendor's image: use a newer image"
    version = package_version(name)
    if version is None:
        return bad(name, f"not installed; ssdctl needs {specifier}", remedy, is_wanted=True)
    if not requirement.specifier.contains(version, prereleases=True):
        return bad(name, f"{version}; ssdctl needs {specifier}", remedy, is_wanted=True)
    return ok(name, version)


def _torchvision() -> list[Check]:
    """Check that torchvision was built for the installed torch; else its kernels are missing."""
    try:
        texts = metadata.requires("torchvision") or []
    except metadata.PackageNotFoundError:
        return []  # reported by _packages
    version = package_version("torch")
    for requirement in map(Requirement, texts):
        if requirement.name != "torch" or version is None or not requirement.specifier:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            detail = f"built for torch {requirement.specifier}, installed is {version}"
            remedy = "pip install --upgrade torch torchvision, both at once"
            return [bad("torchvision", detail, remedy)]
    return []


def _extras(
    config: Config, requirements: list[Requirement], always_installed: set[str]
) -> list[Check]:
    """Check the optional dependencies; absent ones are problems only if the config needs them.

    An extra may also restrict a package that is always installed. That counts only if the extra's
    other packages are installed.
    """
    wanted = {*config.train.tracker, *(["tensorboard"] if config.train.tensorboard else [])}
    wanted |= {dali_extra()} if config.train.pipeline == "dali" else set()
    installed, missing, results = [], [], []
    for extra, purpose in PURPOSES.items():
        members = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        checks = [_check_requirement(r) for r in members if r.name != "ssdctl"]
        if not checks:  # unknown to the metadata
            continue
        wrong = [c for c in checks if c.state != OK]
        own = {c.name for c in checks} - always_installed
        has_all = all(package_version(name) for name in own)
        is_partly = any(package_version(c.name) and (has_all or c.name in own) for c in wrong)
        if not wrong:
            installed.append(extra)
        elif extra in wanted or is_partly:
            detail = "; ".join(f"{c.name}: {c.detail}" for c in wrong)
            packages = " ".join(c.remedy.removeprefix("pip install ") for c in wrong)
            remedy = f"pip install {packages}, for {purpose}"
            results.append(bad(f"extra {extra}", detail, remedy, is_wanted=extra in wanted))
        else:
            missing.append(f"{extra} ({purpose})")
    if installed:
        results.append(ok("extras", ", ".join(installed)))
    if missing:
        results.append(Check("other extras", ABSENT, f"not installed: {', '.join(missing)}"))
    return results


def check_machine(pci: Hardware) -> list[Check]:
    """Return the results for cores, memory, limits of this process, and InfiniBand."""
    checks = [_cores(), _memory(), _shared_memory(pci), _locked_memory(pci), _open_files()]
    return [check for check in [*checks, _infiniband()] if check is not None]


def _cores() -> Check:
    cpus = len(usable_cpus())
    node = read_node(hardware.SYS / "devices/system/cpu")
    numa = len(list((hardware.SYS / "devices/system/node").glob("node[0-9]*"))) or 1
    detail = f"{cpus} usable of {os.cpu_count()}"
    if node.has_topology:
        detail += f": {node.cores} physical on {node.sockets} socket(s), {numa} NUMA node(s)"
    else:
        detail += ", without topology (a VM): mpirun maps ranks by slot"
    quota = cpu_quota(hardware.PROC, hardware.SYS)
    if quota is not None and quota < cpus:
        detail += f"; the cgroup grants {quota:g}"
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) > math.ceil(quota):
            remedy = "threads beyond it are throttled: unset it, or raise the container's limit"
            return bad("cores", f"{detail}, OMP_NUM_THREADS is {threads}", remedy)
    return ok("cores", detail)


def _memory() -> Check:
    table = read_table(hardware.PROC / "meminfo")
    total, available = (table_bytes(table, name) for name in ("MemTotal", "MemAvailable"))
    limit = memory_limit(hardware.PROC, hardware.SYS)
    detail = f"{available / 2**30:.0f} GiB available of {total / 2**30:.0f}"
    if limit is not None and limit < total:
        detail += f"; the cgroup grants {limit / 2**30:.1f} GiB"
        available = min(available, limit)
    if available < LITTLE_MEMORY:
        remedy = "end other programs or raise the limit; a smaller --bs needs less"
        return bad("memory", detail, remedy)
    return ok("memory", detail)


def _shared_memory(pci: Hardware) -> Check:
    try:
        disk = os.statvfs(SHM)
    except OSError as error:
        return bad("/dev/shm", f"absent: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm")
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    detail = f"{free / 2**30:.1f} GiB free of {size / 2**30:.1f}"
    if free < SHM_WANTED and pci.has_cards:
        remedy = (
            "ranks of a node share it: docker run --shm-size=8g; in Kubernetes an emptyDir "
            "with medium Memory on /dev/shm"
        )
        return bad("/dev/shm", detail, remedy)
    return ok("/dev/shm", detail)


def _locked_memory(pci: Hardware) -> Check | None:
    limits = resource_limit("MEMLOCK")
    if limits is None:
        return None
    if limits[0] == UNLIMITED:
        return ok("locked memory", "unlimited")
    detail = f"limit {limits[0] / 2**20:,.1f} MiB"
    if pci.has_rdma or pci.num_gaudi:
        remedy = (
            "RDMA and Gaudi lock their buffers: ulimit -l unlimited; docker run --ulimit "
            "memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        )
        return bad("locked memory", detail, remedy)
    return ok("locked memory", f"{detail}; it matters only for RDMA and Gaudi")


def _open_files() -> Check | None:
    limits = resource_limit("NOFILE")
    if limits is None:
        return None
    soft, hard = limits
    if soft == UNLIMITED or soft >= FILES_NEEDED:
        return ok("open files", "unlimited" if soft == UNLIMITED else f"limit {soft:,}")
    is_raisable = hard == UNLIMITED or hard >= FILES_WANTED
    remedy = f"ulimit -n {FILES_WANTED if is_raisable else hard}"
    if not is_raisable and hard < FILES_NEEDED:
        remedy = f"raise the hard limit of {hard:,} (nofile in /etc/security/limits.conf)"
    return bad("open files", f"limit {soft:,}", remedy)


def _infiniband() -> Check | None:
    """Check that the adapters for RDMA have a port in use."""
    ports = sorted((hardware.SYS / "class/infiniband").glob("*/ports/*"))
    if not ports:
        return None
    states = {
        f"{port.parts[-3]}:{port.name}": hardware.read(port / "state").partition(": ")[2]
        for port in ports
    }
    detail = ", ".join(f"{name} {state or 'unknown'}" for name, state in states.items())
    if "ACTIVE" in states.values():
        return ok("infiniband", detail)
    remedy = "several nodes would use TCP: check cables and the subnet manager (ibstat)"
    return bad("infiniband", detail, remedy)


class Tool(NamedTuple):
    """A program, the arguments that print its version, and when it is needed."""

    name: str
    version_arguments: tuple[str, ...]
    launcher: str  # the one that needs it
    use: str
    remedy: str


VERSION = ("--version",)
LOGIN = "log in to a node of the cluster, or write the script there: launch --write FILE"
KUBECTL = "install kubectl and log in to the cluster; launch --write FILE needs neither"
TOOLS = (
    Tool("mpirun", VERSION, "mpirun", "launch --hpus", "apt-get install openmpi-bin"),
    Tool("sbatch", VERSION, "slurm", "launch --launcher slurm", LOGIN),
    Tool("srun", VERSION, "slurm", "jobs of Slurm", "it comes with sbatch"),
    Tool("kubectl", ("version", "--client"), "kubernetes", "launch --launcher kubernetes", KUBECTL),
)


def check_launchers(config: Config, programs: Programs, pci: Hardware) -> list[Check]:
    """Run every installed program in parallel."""

    def version_of(tool: Tool) -> Callable[[], ProgramOutput]:
        return lambda: programs.run([tool.name, *tool.version_arguments], VERSION_S)

    present = [tool for tool in TOOLS if shutil.which(tool.name)]
    outputs = {tool.name: run_in_daemon_thread(version_of(tool)) for tool in present}
    results = []
    for tool in TOOLS:
        output = outputs[tool.name].result() if tool.name in outputs else None
        results.append(_check_tool(tool, output, config.launch.launcher == tool.launcher, pci))
    return results


def _check_tool(tool: Tool, output: ProgramOutput | None, is_wanted: bool, pci: Hardware) -> Check:
    name, remedy = tool.name, tool.remedy
    if output is None:
        if name == "mpirun" and pci.num_gaudi and not is_wanted:
            return bad(name, f"not found; {tool.use} runs it", remedy)
        return absent(name, f"not found; for {tool.use}", remedy, is_wanted=is_wanted)
    if output.problem:
        return bad(name, f"does not answer: {output.problem}", remedy, is_wanted=is_wanted)
    version = output.out.strip().partition("\n")[0].strip()
    if name == "mpirun" and not re.search("open ?mpi|openrte|prrte", version, re.IGNORECASE):
        remedy = f"ssdctl writes Open MPI's options; put its mpirun first on PATH ({remedy})"
        return bad(name, f"{version}: not Open MPI's", remedy, is_wanted=is_wanted)
    return ok(name, version or "found")
