"""What to run: a request and a node in, a command line and its environment out. Pure.

    plan = make_plan(Request(device="hpu", count=8, command=("train", "--bs=128"), ...), node)
    plan.argv, plan.environment

Whatever the user typed travels as one element of `argv`; nothing here ever meets a shell, but for
the text that `to_line` and `to_script` quote.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ssdctl.config.sections.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from ssdctl.errors import UsageError
from ssdctl.launch import kubernetes, mpirun, pod_spec, slurm, torchrun
from ssdctl.launch.node import Node

# What starts the ranks of a device where the user does not say. (torch_xla lets torchrun start
# one process per chip, and gives each its chip.)
LAUNCHERS = {"hpu": "mpirun", "cuda": "torchrun", "cpu": "torchrun", "xla": "torchrun"}


@dataclass(frozen=True)
class Request:
    """What the user asked for.

    Attributes:
        device: `cpu`, `cuda`, `hpu` or `xla`.
        count: Devices of all nodes, one rank each.
        command: What follows `python -m ssdctl`.
        config: The settings of the table `launch`.
        python: The interpreter that runs the ranks.
        environment: The caller's; some variables of it decide (OMP_NUM_THREADS, MPI_ROOT, ...).
        settings: Variables that the ranks need besides (SSDCTL_EVALUATE__DEVICE).
        hosts: The names in the host file, in its order.
        own_names: What they may call this machine; what others call it comes first.
        free_port: A TCP port that nobody listens on.
        open_mpi: The major version of Open MPI; None if it is unknown.
        slurm: The settings of the table `slurm`.
        kubernetes: The settings of the table `kubernetes`.
        job_name: A name that no other job has, for Kubernetes.
        run_folder: Where `train` writes.
    """

    device: str
    count: int
    command: tuple[str, ...]
    config: LaunchConfig
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    own_names: tuple[str, ...] = ()
    free_port: int = 29500
    open_mpi: int | None = None
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    job_name: str = "ssdctl"
    run_folder: str | None = None

    @property
    def launcher(self) -> str:
        """What starts the ranks."""
        return str(LAUNCHERS[self.device] if self.is_auto else self.config.launcher)

    @property
    def is_auto(self) -> bool:
        return self.config.launcher == "auto"

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes


@dataclass(frozen=True)
class Plan:
    """What to run on this machine.

    Attributes:
        argv: The launcher's command line, to be run without a shell.
        environment: Variables to add to the caller's.
        launcher: `torchrun`, `mpirun`, `slurm` or `kubernetes`.
        num_ranks: Ranks whose end this machine can see.
        nodes: Machines; the ranks of one alone can all leave their exit code here.
        stop_signal: What asks the launcher to let its ranks save and stop.
        asks_ranks: Whether to ask the launcher's children instead, which are the ranks.
        repeats_stop: Whether to send it again while ranks run: mpirun forwards it to the
            ranks it has started so far, so an early one can be lost.
        missing: What the user must still say before this can run; None where it is complete.
        text: What a batch engine reads from its input: a script or a manifest.
        manifest: The same as data, for Kubernetes.
        warnings: What the user should look at.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    launcher: str
    num_ranks: int
    nodes: int = 1
    stop_signal: signal.Signals = signal.SIGTERM
    asks_ranks: bool = False
    repeats_stop: bool = False
    missing: str | None = None
    text: str | None = None
    manifest: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def to_line(self) -> str:
        """The command as one can paste it into a shell."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assigned, shlex.join(self.argv)])

    def to_script(self) -> str:
        """What `--write` writes: the command as a bash script, or what the batch engine reads."""
        if self.text is not None:
            return self.text
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])


def make_plan(request: Request, node: Node) -> Plan:
    """Decide what starts the ranks, and how.

    Raises:
        UsageError: The numbers do not fit, or a setting is missing or malformed.
    """
    _check(request)
    launcher, count, nodes = request.launcher, request.count, request.config.nodes
    if launcher == "slurm":
        text = slurm.build(request, node)
        warnings = slurm.warnings(request)
        return Plan(slurm.ARGV, {}, launcher, count, nodes, text=text, warnings=warnings)
    if launcher == "kubernetes":
        manifest = kubernetes.build(request)
        text = pod_spec.to_yaml(manifest)
        return Plan(
            kubernetes.ARGV,
            {},
            launcher,
            count,
            nodes,
            text=text,
            manifest=manifest,
            warnings=kubernetes.warnings(request),
        )
    if launcher == "torchrun":
        argv, environment, missing = torchrun.build(request, node)
        return Plan(
            argv,
            environment,
            launcher,
            request.ranks_per_node,
            nodes,
            asks_ranks=True,
            missing=missing,
        )
    argv, environment, missing = mpirun.build(request, node)
    is_local = nodes == 1 and not request.hosts
    return Plan(
        argv,
        environment,
        launcher,
        count,
        nodes if is_local else max(nodes, 2),
        stop_signal=signal.SIGTERM if is_local else mpirun.STOP_SIGNAL,
        asks_ranks=is_local,
        repeats_stop=not is_local,
        missing=missing,
        warnings=mpirun.warnings(request),
    )


def _check(request: Request) -> None:
    config = request.config
    if request.device == "xla" and request.launcher == "mpirun":
        raise UsageError(
            "--launcher mpirun: torch_xla takes its chips from torchrun's variables",
            hint="leave --launcher out",
        )
    if request.count % config.nodes:
        raise UsageError(
            f"{request.count} devices do not divide by --nodes {config.nodes}",
            hint="the count is that of all nodes together",
        )
    if config.devices_per_node is not None and config.devices_per_node < request.ranks_per_node:
        raise UsageError(
            f"{request.ranks_per_node} devices a node are asked for, "
            f"but --devices-per-node is {config.devices_per_node}"
        )
    values = [*request.command, *request.settings.values()]
    for argument in [*values, *request.kubernetes.env, request.kubernetes.install or ""]:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UsageError(f"argument {argument!r} is not UTF-8 text")
