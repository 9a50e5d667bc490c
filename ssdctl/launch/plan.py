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

from ssdctl.config.schema import LaunchConfig
from ssdctl.errors import UsageError
from ssdctl.launch import mpirun, torchrun
from ssdctl.launch.node import Node

# What starts the ranks of a device where the user does not say.
LAUNCHERS = {"hpu": "mpirun", "cuda": "torchrun", "cpu": "torchrun"}


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
        free_port: A TCP port that nobody listens on.
    """

    device: str
    count: int
    command: tuple[str, ...]
    config: LaunchConfig
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    free_port: int = 29500

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes


@dataclass(frozen=True)
class Plan:
    """What to run on this machine.

    Attributes:
        argv: The launcher's command line, to be run without a shell.
        environment: Variables to add to the caller's.
        launcher: `torchrun` or `mpirun`.
        num_ranks: Ranks whose end this machine can see.
        stop_signal: What asks the launcher to let its ranks save and stop.
        repeats_stop: Whether to send it again while ranks run: mpirun forwards it to the
            ranks it has started so far, so an early one can be lost. torchrun would break off.
        missing: What the user must still say before this can run; None where it is complete.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    launcher: str
    num_ranks: int
    stop_signal: signal.Signals
    repeats_stop: bool = False
    missing: str | None = None

    def to_line(self) -> str:
        """The command as one can paste it into a shell."""
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assigned, shlex.join(self.argv)])

    def to_script(self) -> str:
        """The command as a bash script."""
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])


def make_plan(request: Request, node: Node) -> Plan:
    """Decide what starts the ranks, and how.

    Raises:
        UsageError: The numbers do not fit, or this version cannot launch that.
    """
    config = request.config
    launcher: str = config.launcher
    if request.device == "xla":
        raise UsageError(
            "--tpus: this version of ssdctl cannot launch TPU jobs yet",
            hint="GPUs and CPUs (torchrun) and HPUs (mpirun) can be launched",
        )
    if launcher == "auto":
        launcher = LAUNCHERS[request.device]
    if launcher not in ("torchrun", "mpirun"):
        raise UsageError(
            f"--launcher {launcher}: this version of ssdctl does not write {launcher} jobs yet",
            hint="use --launcher torchrun or mpirun inside an allocation of your own",
        )
    _check(request)
    if launcher == "torchrun":
        argv, environment, missing = torchrun.build(request, node)
        stop, num_ranks = torchrun.STOP_SIGNAL, request.ranks_per_node
    else:
        argv, environment, missing = mpirun.build(request, node)
        stop, num_ranks = mpirun.STOP_SIGNAL, request.count
    return Plan(
        argv,
        environment,
        launcher,
        num_ranks,
        stop_signal=stop,
        repeats_stop=launcher == "mpirun",
        missing=missing,
    )


def _check(request: Request) -> None:
    config = request.config
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
    for argument in request.command:
        if "\0" in argument or any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise UsageError(f"argument {argument!r} is not UTF-8 text")
