"""What is asked of a launch, and the plan that answers it: data, without imports of the engines.

Everything that the user typed is one element of `argv`; no shell reads it, except for the text that
`to_line` and `to_script` quote.
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
        own_names: Names of this machine; the one that other machines use comes first.
        local_address: The address of this machine that leads to the rendezvous host; None if all
            ranks are on one machine, or if the plan is for other machines.
        torch_version: Major and minor version of PyTorch, some of which have more options.
        free_port: A free TCP port.
        open_mpi: The major version of Open MPI; None if it is unknown.
        slurm: The settings of the table `slurm`.
        kubernetes: The settings of the table `kubernetes`.
        job_name: A name that no other job has, for Kubernetes.
        run_folder: Where `train` writes.
        is_written: The plan goes to a file (--write), to run on another machine perhaps.
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
    is_written: bool = False

    @property
    def launcher(self) -> str:
        """What starts the ranks."""
        config = self.config.launcher
        return DEVICE_TYPES[self.device].launcher if config == "auto" else str(config)

    @property
    def ranks_per_node(self) -> int:
        return self.count // self.config.nodes


@dataclass(frozen=True)
class LaunchPlan:
    """What to run on this machine.

    Attributes:
        argv: The launcher's command line, to be run without a shell.
        environment: Variables to add to the caller's.
        launcher: `torchrun`, `mpirun`, `slurm` or `kubernetes`.
        num_ranks: Ranks that run on this machine, or report to it.
        nodes: Machines; only on one can all ranks leave their exit code here.
        stop_signal: What asks the launcher to let its ranks save and stop.
        asks_ranks: Whether to ask the launcher's children instead, which are the ranks.
        repeats_stop: Whether to send it again while ranks run: mpirun forwards it to the
            ranks it has started so far, so an early one can be lost.
        missing: What the user must still give before this can run; None if it is complete.
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

    def to_log_line(self) -> str:
        """Return the command without secrets."""
        assigned = [f"{name}={value}" for name, value in self.environment.items()]
        words = [word.partition("=") for word in redact_arguments(assigned)]
        line = [f"{name}={shlex.quote(value)}" for name, _, value in words]
        return " ".join([*line, shlex.join(redact_arguments(self.argv))])

    def to_script(self) -> str:
        """What `--write` writes: the command as a bash script, or what the batch engine reads."""
        if self.text is not None:
            return self.text
        exports = [f"export {n}={shlex.quote(value)}" for n, value in self.environment.items()]
        lines = ["#!/usr/bin/env bash", "# Written by ssdctl launch.", *exports]
        return "\n".join([*lines, f"exec {shlex.join(self.argv)}", ""])
