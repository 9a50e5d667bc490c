"""Start a job on N devices, without a shell and without torch. One file per launcher.

    request = LaunchRequest(launcher="mpirun", device="hpu", count=8, command=("train",), ...)
    plan = make_plan(request, read_node())
    plan.argv, plan.environment

A file, or the module of an entry point in the group `ssdctl.launchers`, has:

    Settings                    (optional) its table of the config, named like the launcher
    RUNS_ELSEWHERE              (optional) True if its ranks cannot read this machine's files
    inspect(request)            (optional) add what this machine says, such as a version
    plan(request, node)         return the LaunchPlan, without side effects
    require()                   raise UsageError if this machine cannot run a plan
    SUBMIT                      batch engines: the command that submits a written file
    submit(plan)                batch engines: submit the job, return its id
    follow(job, plan, write)    batch engines: write the job's output, return its exit code
    cancel(job, plan)           batch engines: return the command that ends the job

Each argument of the user is one element of `argv`. No shell parses it, except the text of `to_line`
and `to_script`, which is quoted. `_run.py` runs the plan of a launcher that is not a batch engine.
exit_codes.py derives the exit code of a job, and the rank that failed first. Other files begin with
an underscore.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ssdctl.errors import DistributedError, UsageError
from ssdctl.runtime.hardware import TpuType, find_hardware
from ssdctl.runtime.packages import OLDEST_TORCH, load_plugin
from ssdctl.runtime.safe_text import redact_arguments
from ssdctl.runtime.system import physical_cores, quota_cores, usable_cpus

if TYPE_CHECKING:
    from ssdctl.config.sections import LaunchConfig

Write = Callable[[str], object]
POLL_S = 2.0
UNREACHABLE_S = 120.0  # how long a batch engine may be unreachable
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z0-9]")  # text to every reader of YAML
PLACEHOLDER = "HOST"  # printed if a host's name is still missing; never run
JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*(;[A-Za-z0-9._-]*)?")


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the user requested it."""

    launcher: str  # the program that starts the ranks
    device: str  # cpu, cuda, hpu, tpu or xla
    count: int  # devices of all nodes, one rank each
    command: tuple[str, ...]  # what follows `python -m ssdctl`
    config: LaunchConfig
    python: str  # the interpreter that runs the ranks
    table: Any = None  # the settings of the launcher's own table
    environment: Mapping[str, str] = field(default_factory=dict)  # the caller's
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones for the ranks
    hosts: tuple[str, ...] = ()  # in the order of the host file
    own_names: tuple[str, ...] = ()  # this machine's; what other machines use comes first
    free_port: int = 29500
    job_name: str = "ssdctl"  # a unique one
    run_folder: str | None = None  # a training writes it
    paths: Mapping[str, str] = field(default_factory=dict)  # a training's, by their options
    is_dry_run: bool = False  # only shown: what is missing is a warning, not an error
    is_planned: bool = False  # shown or written, not run: it may be for another machine
    # This machine's address that leads to the rendezvous host; None: all ranks are on one machine,
    # or the plan is for other machines.
    local_address: str | None = None
    torch_version: tuple[int, int] = OLDEST_TORCH  # major and minor; newer ones have more options
    open_mpi: int | None = None  # major version, if it is known
    patch: Mapping[str, Any] = field(default_factory=dict)  # the content of kubernetes.patch

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes


@dataclass(frozen=True)
class LaunchPlan:
    """What to run on this machine."""

    argv: tuple[str, ...]  # run without a shell
    environment: Mapping[str, str]  # added to the caller's
    launcher: str
    num_ranks: int  # ranks that run on this machine, or report to it
    nodes: int = 1  # only if it is 1, all ranks record their exit codes here
    # The signal that the launcher forwards to all ranks, repeated while they run: mpirun forwards
    # it to those it has started so far. None: the ranks here are signaled themselves.
    stop_signal: signal.Signals | None = None
    missing: str | None = None  # what the user must still specify
    text: str | None = None  # the script or manifest for a batch engine
    manifest: Mapping[str, Any] | None = None  # the same as data, for Kubernetes
    warnings: tuple[str, ...] = ()

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
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])


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
        """Return the cores whose time the ranks on this machine can use."""
        return min(self.cores, self.quota or self.cores)


def read_node() -> Node:
    """Return the part of this machine that this process may use."""
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


def load_launcher(name: str) -> Any:
    """Return the module of a launcher."""
    return load_plugin(*LAUNCHERS, name)


def make_plan(request: LaunchRequest, node: Node) -> LaunchPlan:
    """Return the plan of a launch, without side effects."""
    config, ranks = request.config, request.ranks_per_node
    if request.count % config.nodes:
        raise UsageError(
            f"{request.count} devices do not divide by --nodes {config.nodes}",
            hint="the count is that of all nodes together",
        )
    if config.devices_per_node is not None and config.devices_per_node < ranks:
        raise UsageError(
            f"{ranks} devices per node are requested, "
            f"but --devices-per-node is {config.devices_per_node}"
        )
    for argument in (*request.command, *request.variables.values()):
        check_text(argument)
    plan: LaunchPlan = load_launcher(request.launcher).plan(request, node)
    return plan


def check_text(argument: str) -> None:
    """Refuse an argument that no command line can contain."""
    if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
        raise UsageError(f"argument {argument!r} is not UTF-8 text")


def check_form(engine: str, name: str, value: str, form: str, max_length: int = 1 << 20) -> str:
    """Return the value of a setting in the engine's table; refuse one without the form."""
    if not re.fullmatch(form, value, re.ASCII | re.DOTALL) or len(value) > max_length:
        raise UsageError(
            f"{engine.lower()}.{name}: {value!r} is not a value that {engine} accepts there"
        )
    return value


def require_program(program: str, hint: str) -> None:
    if shutil.which(program) is None:
        raise UsageError(f"{program} is not on PATH", hint=hint)


def last_value(command: Sequence[str], option: str) -> str | None:
    """Return the last value of an option in a command."""
    value = None
    for word, following in zip(command, [*command[1:], None], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def resume_setting(request: LaunchRequest, variables: Mapping[str, str]) -> str | None:
    """Return the `--resume` of a launched training; None if it is not given."""
    return last_value(request.command, "--resume") or variables.get("SSDCTL_TRAIN__RESUME")


def submit_text(plan: LaunchPlan, list_command: str) -> str:
    """Give a script or manifest to the client; return the id that it prints.

    Raises:
        UsageError: The engine rejects it; its message is included.
        DistributedError: The engine accepts it, but does not print its id.
    """
    process = _call(plan.argv, plan.text)
    if process.returncode:
        raise UsageError(f"{plan.argv[0]} refused the job: {process.stderr.strip()}")
    job = process.stdout.strip().rpartition("\n")[2]  # kubectl: one line per object, the job last
    if not JOB_ID.fullmatch(job):
        raise DistributedError(
            f"{plan.argv[0]} printed {job[:200]!r} instead of the id of the job",
            hint=f"the job may run: `{list_command}` lists the jobs",
        )
    return job


def query(*argv: str) -> str:
    """Return the output of an engine's client; retry while a controller is unavailable.

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
    # Its output may have any bytes.
    return subprocess.run(argv, input=text, capture_output=True, encoding="utf-8", errors="replace")


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return a document as YAML for 1.1 and 1.2 readers; text that resembles a number is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        lines = value.split("\n")
        is_plain = value.isascii() and all(n.isprintable() and n == n.rstrip() for n in lines)
        is_program = is_plain and len(lines) > 2 and lines[0] == lines[0].strip() != ""
        style = None if PLAIN.fullmatch(value) else "|" if is_program else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    written = yaml.dump(document, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=False)
    return f"# Written by ssdctl launch.\n{written}"


# Last: the config imports the launchers for their tables, and they import the above.
from ssdctl.config.sections import LAUNCHERS  # noqa: E402
