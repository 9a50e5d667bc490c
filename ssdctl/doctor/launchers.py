"""What starts ranks here: mpirun, Slurm's and Kubernetes' clients, each by its own `--version`."""

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
    """A program, how to ask for its version, and when it is needed."""

    name: str
    question: tuple[str, ...]
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
    """Ask each program that is here, all at once."""
    asked = [(tool, _ask(tool, runner)) for tool in TOOLS]
    return [_judge(tool, answer.result(), config, pci) for tool, answer in asked]


def _ask(tool: Tool, runner: ProbeRunner) -> Future[ProbeOutput | None]:
    def work() -> ProbeOutput | None:
        if shutil.which(tool.name) is None:
            return None
        return runner.run([tool.name, *tool.question], VERSION_S)

    return run_in_daemon_thread(work)


def _judge(tool: Tool, answer: ProbeOutput | None, config: Config, pci: Hardware) -> CheckResult:
    is_wanted = config.launch.launcher == tool.launcher
    if answer is None:
        if tool.name == "mpirun" and pci.num_gaudi and not is_wanted:
            return CheckResult(tool.name, WARN, f"not found; {tool.use} runs it", tool.remedy)
        detail = f"not found; for {tool.use}"
        return absent(tool.name, detail, tool.remedy, is_wanted=is_wanted)
    if answer.problem:
        state = FAIL if is_wanted else WARN
        return CheckResult(tool.name, state, f"does not answer: {answer.problem}", tool.remedy)
    said = answer.out.strip().partition("\n")[0].strip()
    if tool.name == "mpirun" and not re.search("open ?mpi|openrte|prrte", said, re.IGNORECASE):
        state = FAIL if is_wanted else WARN
        remedy = f"ssdctl writes Open MPI's options; put its mpirun first on PATH ({tool.remedy})"
        return CheckResult(tool.name, state, f"{said}: not Open MPI's", remedy)
    return CheckResult(tool.name, OK, said or "found")
