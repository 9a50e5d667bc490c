"""The request of a launch, its job, the node that it is planned on, and the abstract launchers.

A file in `engines/`, or the module of an entry point in the group `ssdctl.launchers`, names its
subclass of `Engine` as `ENGINE`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ssdctl.config.sections import LaunchConfig
from ssdctl.errors import DistributedError, UsageError
from ssdctl.runtime import plugins
from ssdctl.runtime.hardware import TpuType, find_hardware
from ssdctl.runtime.plugins import LAUNCHERS
from ssdctl.runtime.safe_text import counted, redact_arguments
from ssdctl.runtime.system import physical_cores, quota_cores, usable_cpus

if TYPE_CHECKING:
    from typing_extensions import Self

    from ssdctl.config import Config

Write = Callable[[str], object]
PLACEHOLDER = "HOST"  # printed if a host's name is still missing; never run
POLL_S = 2.0
WRITTEN = "# Written by ssdctl launch."  # marks the files of --write
UNREACHABLE_S = 120.0  # how long the controller of a batch engine may be unavailable
# Variables of an outer job that starts this one. With them, rank 0 would wait for the store of the
# outer torchrun; PET_* are torchrun's options.
OUTER_JOB = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
FREE_PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
OUTER_PREFIX = "PET_"
OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # for Slurm's own clients
UNSET_OUTER_JOB = f"unset {' '.join(OUTER_JOB)} ${{!{OUTER_PREFIX}@}}"  # a line of a script
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(;[A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the user requested it."""

    device: str  # cpu, cuda, hpu, tpu or xla
    count: int  # devices of all nodes, one rank each
    command: tuple[str, ...]  # what follows `python -m ssdctl`
    config: LaunchConfig
    python: str  # the interpreter that runs the ranks
    environment: Mapping[str, str] = field(default_factory=dict)  # the caller's
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones for the ranks
    hosts: tuple[str, ...] = ()  # in the order of the host file
    run_folder: str | None = None  # a training writes it
    resume: str | None = None  # `--resume` of a training
    is_dry_run: bool = False  # only shown: what is missing is a warning, not an error
    is_written: bool = False  # into a file, which may run on another machine

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes

    @property
    def resumes_automatically(self) -> bool:
        """Return whether a restart is given `--resume=auto`.

        A file remains: the run's own checkpoints come first if there are any.
        """
        return self.resume in ("auto", "never")  # `never` applies only to the first attempt

    @property
    def is_planned(self) -> bool:
        """Return whether the job may run on another machine: it is not run now."""
        return self.is_dry_run or self.is_written


@dataclass(frozen=True)
class Job:
    """A planned launch. Each argument of the user is one element of `argv`: no shell parses it."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]  # added to the caller's
    launcher: str
    num_ranks: int  # ranks that run on this machine, or report to it
    nodes: int = 1  # if it is 1, all ranks record their exit codes on this machine
    # The signal that the launcher forwards to all ranks. It is repeated, because mpirun forwards it
    # only to the ranks that have started. None: signal the ranks on this machine directly.
    stop_signal: signal.Signals | None = None
    missing: str | None = None  # what the user must still specify
    text: str | None = None  # the script or manifest for a batch engine
    manifest: Mapping[str, Any] | None = None  # the same as data, for Kubernetes
    warnings: tuple[str, ...] = ()
    # What a script has instead of an argument, as text for the shell: it may run much later.
    script_words: Mapping[str, str] = field(default_factory=dict)

    def to_line(self, *, with_secrets: bool = True) -> str:
        """Return the command as one line for a shell."""
        pairs, argv = [f"{n}={value}" for n, value in self.environment.items()], list(self.argv)
        if not with_secrets:
            pairs, argv = redact_arguments(pairs), redact_arguments(argv)
        words = [pair.partition("=") for pair in pairs]
        return " ".join([*(f"{n}={shlex.quote(value)}" for n, _, value in words), shlex.join(argv)])

    def to_script(self) -> str:
        """Return the text for `--write`: a bash script, or the input of the batch engine."""
        if self.text is not None:
            return self.text
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", WRITTEN, UNSET_OUTER_JOB, *exports]
        words = [shlex.quote(argument) for argument in self.argv]
        for argument, word in self.script_words.items():
            words[self.argv.index(argument)] = word
        return "\n".join([*lines, f"exec {' '.join(words)}", ""])


@dataclass(frozen=True)
class Node:
    """One machine. The hyper-threads of a core count once, if the topology is known."""

    cores: int
    sockets: int
    has_topology: bool = True
    has_numactl: bool = False  # the program that torchrun binds ranks with
    tpus: int = 0  # chips; 0 also if the PCI bus cannot be read
    tpu: TpuType | None = None  # their version
    quota: int | None = None  # cores' time that the cgroups of this process grant, rounded up

    @property
    def local_cores(self) -> int:
        """Return the number of cores that the ranks on this machine can use."""
        return min(self.cores, self.quota or self.cores)


def read_node() -> Node:
    """Return this machine, without the parts that this process may not use."""
    cores, has_topology = physical_cores(usable_cpus())
    sockets, tpus = {socket for socket, _ in cores}, find_hardware().tpus
    return Node(
        max(1, len(cores)),
        max(1, len(sockets)),
        has_topology,
        has_numactl=shutil.which("numactl") is not None,
        tpus=len(tpus),
        tpu=tpus[0] if tpus else None,
        quota=quota_cores(),
    )


class Engine(ABC):
    """A program that starts the ranks of a job.

    An instance has what only this launcher needs: its settings, and facts about this machine.
    """

    name: ClassVar[str]
    runs_elsewhere: ClassVar[bool] = False  # its ranks cannot read this machine's files

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Self:
        """Return the launcher with its settings and facts about this machine, such as a version."""
        return cls()

    @abstractmethod
    def require(self) -> None:
        """Raise UsageError with the remedy if this machine cannot run the launcher."""

    @abstractmethod
    def build_job(self, request: LaunchRequest, node: Node) -> Job:
        """Return the job, without side effects."""


class BatchEngine(Engine):
    """A launcher that queues jobs instead of running them."""

    submit_command: ClassVar[str]  # submits a written file

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Submit a job; return its id."""

    @abstractmethod
    def follow(self, job_id: str, job: Job, write: Write) -> int:
        """Write the output of a job until it ends; return its exit code."""

    @abstractmethod
    def cancel(self, job_id: str, job: Job) -> str:
        """Return the command that ends a job."""


# What the methods of a launcher return.
RETURNS: dict[str, type] = {
    "configure": Engine,
    "require": type(None),
    "build_job": Job,
    "submit": str,
    "follow": int,
    "cancel": str,
}


def load_engine(name: str) -> type[Engine]:
    """Return the class of a launcher."""
    module, plugin = plugins.load(LAUNCHERS, name)
    engine: Any = getattr(module, "ENGINE", None)
    if plugin is not None:
        is_engine = isinstance(engine, type) and issubclass(engine, Engine)
        plugin.require(is_engine, "ENGINE, a subclass of Engine")
        missing = ", ".join(sorted(getattr(engine, "__abstractmethods__", ())))
        plugin.require(not missing, f"ENGINE to define {missing}")
        for attribute in ("name", *["submit_command"] * issubclass(engine, BatchEngine)):
            is_text = isinstance(getattr(engine, attribute, None), str)
            plugin.require(is_text, f"ENGINE to define {attribute}, a text")
        returns = {name: kind for name, kind in RETURNS.items() if hasattr(engine, name)}
        return plugins.guarded(engine, plugin, returns)
    found: type[Engine] = engine
    return found


def make_job(engine: Engine, request: LaunchRequest, node: Node) -> Job:
    """Return the job of a launch, without side effects; UsageError if the counts do not fit."""
    config, ranks = request.config, request.ranks_per_node
    if request.count % config.nodes:
        raise UsageError(
            f"{request.count} devices do not divide by --nodes {config.nodes}",
            hint="the count is for all nodes together",
        )
    if config.devices_per_node is not None and config.devices_per_node < ranks:
        raise UsageError(
            f"{ranks} devices per node are requested, "
            f"but --devices-per-node is {config.devices_per_node}"
        )
    if config.hostfile is not None and len(request.hosts) < config.nodes:
        hosts = counted(len(request.hosts), "host")
        raise UsageError(f"--nodes {config.nodes}, but {config.hostfile} names {hosts}")
    for argument in (*request.command, *request.variables.values()):
        check_text(argument)
    return engine.build_job(request, node)


def is_of_outer_job(variable: str) -> bool:
    return variable in OUTER_JOB or variable.startswith(OUTER_PREFIX)


def check_text(argument: str) -> None:
    """Refuse an argument that no command line can contain."""
    if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
        raise UsageError(f"argument {argument!r} is not UTF-8 text")


def require_program(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not on PATH", hint=hint)


def submit_text(job: Job, list_command: str) -> str:
    """Give a script or manifest to sbatch or kubectl; return the id that it prints.

    Raises:
        UsageError: The engine rejects it; its message is included.
        DistributedError: The engine accepts it, but does not print its id.
    """
    process = _call(job.argv, job.text)
    if process.returncode:
        made = " ".join(process.stdout.split())
        hint = f"it has made {made} before: `{job.argv[0]} delete {made}`" if made else None
        raise UsageError(f"{job.argv[0]} refused the job: {process.stderr.strip()}", hint=hint)
    job_id = process.stdout.strip().rpartition("\n")[2]  # kubectl: one line per object, it is last
    if not JOB_ID.fullmatch(job_id):
        raise DistributedError(
            f"{job.argv[0]} printed {job_id[:200]!r} instead of the id of the job",
            hint=f"the job may run: `{list_command}` lists the jobs",
        )
    return job_id


def query(*argv: str) -> str:
    """Return the output of an engine's client; retry while the controller is unavailable.

    Raises:
        DistributedError: The engine no longer answers or no longer lists the job.
    """
    end = time.monotonic() + UNREACHABLE_S
    while True:
        process = _call(argv)
        if process.returncode == 0:
            return process.stdout
        if "Invalid job id" in process.stderr or "NotFound" in process.stderr:
            raise DistributedError(f"{argv[0]} no longer lists the job: {process.stderr.strip()}")
        if time.monotonic() > end:
            raise DistributedError(f"{argv[0]} does not answer: {process.stderr.strip()}")
        time.sleep(POLL_S)


def _call(argv: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    # A job takes the caller's variables along, but not those of an allocation that it is in.
    own = {k: v for k, v in os.environ.items() if k in OF_CLUSTER or not k.startswith("SLURM_")}
    own.pop("SBATCH_WAIT", None)  # `launch --wait` waits
    # Its output may have any bytes.
    return subprocess.run(
        argv, input=text, capture_output=True, encoding="utf-8", errors="replace", env=own
    )


def last_value(command: Sequence[str], option: str) -> str | None:
    """Return the last value of an option in a command."""
    value = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value
