"""Check mpirun and the clients of Slurm and Kubernetes by their version output."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import Future
from typing import NamedTuple

from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult, absent
from ssdctl.doctor.hardware import Hardware
from ssdctl.doctor.subprocess_probe import ProbeOutput, ProbeRunner
from ssdctl.runtime.background import run_in_daemon_thread

VERSION_S = 15.0


class Tool(NamedTuple):
    """A program, the arguments that print its version, and when it is needed."""

    name: str
    version_arguments: tuple[str, ...]
    launcher: str  # the one that needs it
    use: str
    remedy: str


TOOLS = (
    Tool("mpirun", ("--version",), "mpirun", "launch --hpus", "apt-get install openmpi-bin"),
    Tool(
        "sbatch",
        ("--version",),
        "slurm",
        "launch --launcher slurm",
        "log in to a node of the cluster, or write the script there: launch --write FILE",
    ),
    Tool("srun", ("--version",), "slurm", "jobs of Slurm", "it comes with sbatch"),
    Tool(
        "kubectl",
        ("version", "--client"),
        "kubernetes",
        "launch --launcher kubernetes",
        "install kubectl and log in to the cluster; launch --write FILE needs neither",
    ),
)


def check_launchers(config: Config, runner: ProbeRunner, pci: Hardware) -> list[CheckResult]:
    """Run every installed program in parallel."""
    outputs = [(tool, _start(tool, runner)) for tool in TOOLS]
    return [_to_result(tool, output.result(), config, pci) for tool, output in outputs]


def _start(tool: Tool, runner: ProbeRunner) -> Future[ProbeOutput | None]:
    def work() -> ProbeOutput | None:
        if shutil.which(tool.name) is None:
            return None
        return runner.run([tool.name, *tool.version_arguments], VERSION_S)

    return run_in_daemon_thread(work)


def _to_result(
    tool: Tool, output: ProbeOutput | None, config: Config, pci: Hardware
) -> CheckResult:
    is_wanted = config.launch.launcher == tool.launcher
    if output is None:
        if tool.name == "mpirun" and pci.num_gaudi and not is_wanted:
            return CheckResult(tool.name, WARN, f"not found; {tool.use} runs it", tool.remedy)
        detail = f"not found; for {tool.use}"
        return absent(tool.name, detail, tool.remedy, is_wanted=is_wanted)
    if output.problem:
        state = FAIL if is_wanted else WARN
        return CheckResult(tool.name, state, f"does not answer: {output.problem}", tool.remedy)
    version = output.out.strip().partition("\n")[0].strip()
    if tool.name == "mpirun" and not re.search("open ?mpi|openrte|prrte", version, re.IGNORECASE):
        state = FAIL if is_wanted else WARN
        remedy = f"ssdctl writes Open MPI's options; put its mpirun first on PATH ({tool.remedy})"
        return CheckResult(tool.name, state, f"{version}: not Open MPI's", remedy)
    return CheckResult(tool.name, OK, version or "found")
