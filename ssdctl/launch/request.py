"""The request of a launch and the plan for it; data without imports of the launchers.

Each argument of the user is one element of `argv`. No shell parses it, except the text of `to_line`
and `to_script`, which is quoted.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.sections.launch import KubernetesConfig, LaunchConfig, SlurmConfig
from ssdctl.runtime.redact import redact_arguments
from ssdctl.runtime.torch_compat import OLDEST


@dataclass(frozen=True)
class LaunchRequest:
    """A launch as the user requested it.

    Attributes:
        device: `cpu`, `cuda`, `hpu` or `xla`.
        count: Devices of all nodes, one rank each.
        command: What follows `python -m ssdctl`.
        config: The settings of the table `launch`.
        python: The interpreter that runs the ranks.
        environment: The caller's; some of its variables are read (OMP_NUM_THREADS, MPI_ROOT, ...).
        settings: Additional variables for the ranks (SSDCTL_EVALUATE__DEVICE).
        hosts: The names in the host file, in order.
        own_names: Names of this machine; the one that other machines use comes first.
        local_address: The address of this machine that leads to the rendezvous host; None if all
            ranks are on one machine, or if the plan is for other machines.
        torch_version: Major and minor version of PyTorch; newer ones have more options.
        free_port: A free TCP port.
        open_mpi: The major version of Open MPI; None if it is unknown.
        slurm: The settings of the table `slurm`.
        kubernetes: The settings of the table `kubernetes`.
        job_name: A unique name, for Kubernetes.
        run_folder: The run folder of `train`.
        patch: The content of `kubernetes.patch`.
        is_dry_run: The plan is only shown: what is missing is a warning, not an error.
        is_planned: The plan is shown or written, not run: it may be for another machine.
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
    local_address: str | None = None
    torch_version: tuple[int, int] = OLDEST
    free_port: int = 29500
    open_mpi: int | None = None
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    job_name: str = "ssdctl"
    run_folder: str | None = None
    patch: Mapping[str, Any] = field(default_factory=dict)
    is_dry_run: bool = False
    is_planned: bool = False

    @property
    def launcher(self) -> str:
        """Return the program that starts the ranks."""
        config = self.config.launcher
        return DEVICE_TYPES[self.device].launcher if config == "auto" else str(config)

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes


@dataclass(frozen=True)
class LaunchPlan:
    """What to run on this machine.

    Attributes:
        argv: The launcher's command line; it is run without a shell.
        environment: Variables to add to the caller's.
        launcher: `torchrun`, `mpirun`, `slurm` or `kubernetes`.
        num_ranks: Ranks that run on this machine, or report to it.
        nodes: Machines; only if it is 1, all ranks record their exit codes here.
        stop_signal: The signal that makes the launcher stop its ranks after they saved.
        signals_ranks: Whether to signal the launcher's children, the ranks, instead.
        repeats_stop: Whether to send it again while ranks run: mpirun forwards it to the
            ranks it has started so far, so an early one can be lost.
        missing: What the user must still specify; None if the plan is complete.
        text: Standard input of a batch engine: a script or a manifest.
        manifest: The same as data, for Kubernetes.
        warnings: Messages for the user.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    launcher: str
    num_ranks: int
    nodes: int = 1
    stop_signal: signal.Signals = signal.SIGTERM
    signals_ranks: bool = False
    repeats_stop: bool = False
    missing: str | None = None
    text: str | None = None
    manifest: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def to_line(self) -> str:
        """Return the command as one line for a shell."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*assignments, shlex.join(self.argv)])

    def to_log_line(self) -> str:
        """Return the command without secrets."""
        assignments = [f"{name}={value}" for name, value in self.environment.items()]
        words = [word.partition("=") for word in redact_arguments(assignments)]
        line = [f"{name}={shlex.quote(value)}" for name, _, value in words]
        return " ".join([*line, shlex.join(redact_arguments(self.argv))])

    def to_script(self) -> str:
        """Return the text for `--write`: a bash script, or the input of the batch engine."""
        if self.text is not None:
            return self.text
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])
