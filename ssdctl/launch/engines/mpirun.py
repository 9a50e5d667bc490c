"""Build the command line of Open MPI's mpirun, following Habana's guides for Gaudi.

Gaudi images up to release 1.22 have Open MPI 4.1, later ones 5.0. Both accept every option that is
used here (the tests run both), so a script written on a machine without mpirun runs with either.
The differences: version 5 has another option for the arguments of ssh, and starts rank 0 on the
first host of the host file; version 4 starts it on the launching host.
"""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.config.resolve import FILES_VARIABLE
from ssdctl.distributed import find_own, free_port
from ssdctl.errors import UsageError
from ssdctl.files import read_limited, unreadable
from ssdctl.launch.base import (
    FREE_PORT,
    PLACEHOLDER,
    Engine,
    Job,
    LaunchRequest,
    Node,
    require_program,
)
from ssdctl.runtime.hardware import BINDING_VARIABLE

if TYPE_CHECKING:
    from ssdctl.config import Config

# On SIGTERM and SIGINT mpirun kills its ranks two seconds later, even while they save. It
# forwards SIGUSR1 to all of them, on every node, and waits; `ssdctl train` stops on that signal.
# (On one node processes.py signals the ranks directly.)
STOP_SIGNAL = signal.SIGUSR1
MAX_HOSTFILE_BYTES = 16 << 20
# A name as long as in DNS, or an IPv6 address; not NAME:SLOTS of other launchers.
HOST = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]{0,252}|(?=.*:.*:)[0-9A-Fa-f:.]{2,45}")
SLOTS = re.compile(r"(?:slots|count|cpus?)\s*=\s*(\S*)", re.IGNORECASE)
MAX_SLOTS = 65_536  # more than any machine has, and few enough for mpirun's memory
UNKNOWN_SOCKETS = 2  # Gaudi nodes have two
# Variables that ranks on other nodes need; mpirun does not export any by default. Each rank sets
# PT_HPU_AUTOLOAD itself (ssdctl/__main__.py).
EXPORTED = re.compile(
    rf"{FILES_VARIABLE}|PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|OMP_NUM_THREADS|TORCH_HOME|"
    r"XDG_CACHE_HOME|GC_KERNEL_PATH|RDMAV_FORK_SAFE|(https?|no|HTTPS?|NO)_(proxy|PROXY)|"
    r"(SSDCTL|PT_HPU(?!_AUTOLOAD$)|HABANA|HCCL|NCCL|GLOO|TORCH|UCX|FI|RDMA)_[A-Za-z0-9_]+"
)
# The pods of a job are always new: their host keys are unknown, and sshd may not have started yet.
POD_SSH = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=30"
IN_AN_MPI_JOB = "K_MPI_JOB_ROLE"  # the MPI operator sets it in its pods
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MISSING_HOST = "mpirun on several nodes needs --hostfile FILE, or MASTER_ADDR in an allocation"


@dataclass(frozen=True)
class Mpirun(Engine):
    name = "mpirun"
    open_mpi: int | None = None  # major version, if it is known
    port: int = 29500  # a free one, where the ranks meet
    own_index: int | None = None  # of this machine in the host file

    @classmethod
    def configure(cls, config: Config, request: LaunchRequest) -> Mpirun:
        """Read the version of Open MPI, find a free port, and this machine in the host file."""
        hint = "mpirun takes --hostfile FILE"
        config.require_not_given(["launch.rdzv_endpoint"], "is torchrun's", hint)
        if len(request.hosts) > 1 and not config.is_chosen("launch.nodes"):
            text = f"{request.config.hostfile} lists {len(request.hosts)} hosts: give --nodes"
            raise UsageError(text)
        command, own_index = ["mpirun", "--version"], find_own(request.hosts)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return cls(port=free_port(), own_index=own_index)
        match = re.search(r"Open MPI\) v?(\d+)\.", done.stdout)
        return cls(int(match[1]) if match else None, free_port(), own_index)

    def require(self) -> None:
        require_program(
            "mpirun",
            "install Open MPI (Debian: apt install openmpi-bin; Gaudi's images have it), "
            "or use --launcher torchrun",
        )

    def build_job(self, request: LaunchRequest, node: Node) -> Job:
        config = request.config
        _refuse_unsupported(request)
        is_local = config.nodes == 1 and not request.hosts
        options = ["-n", str(request.count), *self._placement(request, node)]
        options += ["--report-bindings", "--allow-run-as-root", *self._ssh(request)]
        if is_local and "SLURM_JOB_ID" in request.environment:
            # Else its slots are the allocation's tasks: 1 in an interactive one.
            options += [self._of_framework(), "ras", "^slurm"]
        if (path := config.hostfile) is not None:
            options += ["--hostfile", f"./{path}" if path.startswith("-") else path]
        address, port, missing = self._meeting_point(request)
        for name in config.export_env:
            if not VARIABLE.fullmatch(name):
                raise UsageError(f"--export-env {name!r} is not the name of a variable")
        meeting_port = f"MASTER_PORT={port}"
        options += ["-x", f"MASTER_ADDR={address}", "-x", meeting_port]
        chosen_port = f'MASTER_PORT="$({shlex.quote(request.python)} -c "{FREE_PORT}")"'
        options += [] if is_local else _exports(request)
        return Job(
            ("mpirun", *options, request.python, "-m", "ssdctl", *request.command),
            request.variables,
            self.name,
            request.count,
            config.nodes if is_local else max(config.nodes, 2),
            stop_signal=None if is_local else STOP_SIGNAL,
            missing=missing,
            warnings=tuple(self._warnings(request)),
            script_words={meeting_port: chosen_port} if port == str(self.port) else {},
        )

    def _ssh(self, request: LaunchRequest) -> list[str]:
        """Return the options for mpirun's own installation and, in pods, for ssh."""
        root = request.environment.get("MPI_ROOT")
        options = ["--prefix", root] if root else []
        if IN_AN_MPI_JOB not in request.environment:
            return options
        # As options, because the operator's own variable overrides the manifest's.
        name = self._of_framework()
        return [*options, name, f"plm_{'ssh' if name == '--prtemca' else 'rsh'}_args", POD_SSH]

    def _of_framework(self) -> str:
        """Return the option that sets a parameter of Open MPI's own framework."""
        return "--prtemca" if self.open_mpi is not None and self.open_mpi >= 5 else "--mca"

    def _meeting_point(self, request: LaunchRequest) -> tuple[str, str, str | None]:
        """Return address and port of rank 0, and the option that is missing to know them."""
        address, port, missing = "127.0.0.1", str(self.port), None
        if request.hosts:
            address = self._first_rank(request)
        elif request.config.nodes > 1:
            address = request.environment.get("MASTER_ADDR", PLACEHOLDER)
            missing = MISSING_HOST if address == PLACEHOLDER else None
        if request.config.nodes > 1:
            port = request.environment.get("MASTER_PORT", port)
        if not HOST.fullmatch(address):
            raise UsageError(f"MASTER_ADDR {address!r} is not a host name")
        if not re.fullmatch("[0-9]{1,5}", port):
            raise UsageError(f"MASTER_PORT {port!r} is not a port")
        return address, port, missing

    def _warnings(self, request: LaunchRequest) -> Iterator[str]:
        config, version = request.config, self.open_mpi
        if version is None and len(request.hosts) > 1:
            yield (
                f"start this on {request.hosts[0]}, the first host of {config.hostfile}: Open MPI "
                "4 starts rank 0 on the launching host, version 5 on the first one"
            )
        is_listed = not request.hosts or self.own_index is not None
        is_other_machine = request.is_planned or version is None or not is_listed
        if is_other_machine and config.cores_per_node is None and config.bind_to == "core":
            yield (
                "core binding is computed from the cores of this machine; if the nodes have "
                "another number of cores, give --cores-per-node N"
            )

    def _first_rank(self, request: LaunchRequest) -> str:
        """Return the host of rank 0, by the name that the other hosts use.

        Open MPI 4 starts rank 0 on the launching host if it is listed, version 5 on the first host.
        """
        host = request.hosts[(self.own_index or 0) if self.open_mpi == 4 else 0]
        is_loopback = host == "localhost" or host.startswith("127.")
        return socket.gethostname() if is_loopback and len(request.hosts) > 1 else host

    def _placement(self, request: LaunchRequest, node: Node) -> list[str]:
        """Return the options that give each rank PE adjacent cores of its node, rank by rank.

        `ppr:N:node` fills a node's cores in order. `socket` would alternate between the sockets,
        while cards are numbered socket by socket; on several nodes it would fill the first one.
        """
        config, ranks = request.config, request.ranks_per_node
        cores = config.cores_per_node or node.local_cores
        is_known = config.cores_per_node in (None, node.cores)
        sockets = node.sockets if is_known else UNKNOWN_SOCKETS
        share = cores // (config.devices_per_node or ranks)
        # A rank's cores are in one socket, or Open MPI 5 refuses them: 3 ranks on 2 x 24 cores can
        # have 12 each, not 16.
        share = min(share, cores // sockets // -(-ranks // sockets)) if sockets > 1 else share
        has_cores = node.has_topology or config.cores_per_node is not None
        if config.bind_to == "none" or not has_cores or share < 1:  # there is nothing to bind to
            unit = "slot" if config.nodes == 1 else f"ppr:{ranks}:node"
            unbound = ["--bind-to", "none", "--map-by", f"{unit}:OVERSUBSCRIBE"]
            if config.bind_to == "none":
                unbound += ["-x", f"{BINDING_VARIABLE}=none"]
            unbound += ["--rank-by", "slot", "-x", f"LOCAL_WORLD_SIZE={ranks}"]
            if "OMP_NUM_THREADS" not in request.environment:  # each would use all cores
                unbound += ["-x", f"OMP_NUM_THREADS={max(1, cores // ranks)}"]
            return unbound
        unit = f"ppr:{ranks}:node:PE={share}"
        return ["--bind-to", "core", "--map-by", unit, "--rank-by", "slot"]


ENGINE = Mpirun


def refuse_separator(request: LaunchRequest) -> None:
    if ":" in request.command:
        raise UsageError("mpirun takes a single ':' as its own separator: it cannot be an argument")


def _refuse_unsupported(request: LaunchRequest) -> None:
    if request.device in ("tpu", "xla"):
        raise UsageError(
            "--launcher mpirun: TPU processes take their chips from torchrun's variables",
            hint="leave --launcher out",
        )
    refuse_separator(request)


def _exports(request: LaunchRequest) -> list[str]:
    """Return the options that pass variables to other nodes; mpirun reads their values."""
    present = {**request.environment, **request.variables}
    names = {*filter(EXPORTED.fullmatch, present), *request.config.export_env}
    return [word for name in sorted(names) for word in ("-x", name)]


def read_hosts(path: Path) -> tuple[str, ...]:
    """Return the host names of an Open MPI host file (`NAME slots=8`, `#` comments), in its order.

    Raises:
        UsageError: It cannot be read, is empty, or contains an invalid host or number of slots.
        DiskError: The file system refuses to read it.
    """
    try:
        lines = read_limited(path, MAX_HOSTFILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(f"--hostfile {path}", error, UsageError) from None
    hosts: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        host, *options = line.partition("#")[0].split() or [""]
        if not host:
            continue
        if not HOST.fullmatch(host):
            raise UsageError(
                f"--hostfile {path}:{number}: {host[:60]!r} is not a host name",
                hint="one host per line, as NAME slots=8. The user name of ssh is set in "
                "~/.ssh/config; scontrol show hostnames expands a list of Slurm",
            )
        for slots in SLOTS.findall(" ".join(options)):
            if not re.fullmatch("[0-9]{1,9}", slots) or int(slots) > MAX_SLOTS:
                raise UsageError(
                    f"--hostfile {path}:{number}: {slots[:20]!r} is not a number of slots up to "
                    f"{MAX_SLOTS:,}"
                )
        hosts[host] = None
    if not hosts:
        raise UsageError(f"--hostfile {path}: contains no host")
    return tuple(hosts)
