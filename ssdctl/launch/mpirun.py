"""The command line of Open MPI's mpirun, as Habana's guides write it for Gaudi.

Run for real with Open MPI 4.1, the version of the Gaudi images. Open MPI 5 spells some options
anew (a socket is a package, ranks are ordered by slot); that spelling was not run.
"""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ssdctl.errors import UsageError
from ssdctl.launch.node import Node

if TYPE_CHECKING:
    from ssdctl.launch.plan import Request

# On SIGTERM and SIGINT mpirun kills its ranks two seconds later, whatever they are saving. It
# forwards SIGUSR1 to all of them, on every node, and waits; `ssdctl train` reads it as "stop".
# (On one node run.py asks the ranks itself.)
STOP_SIGNAL = signal.SIGUSR1
HOST = re.compile(r"[A-Za-z0-9.:_][A-Za-z0-9.:_-]*")
PLACEHOLDER = "HOST"  # printed where a host's name is still to be said; never run
# What ranks on other nodes need of this machine's environment: mpirun itself carries nothing over.
CARRIED = re.compile(
    r"PYTHONPATH|LD_LIBRARY_PATH|LD_PRELOAD|OMP_NUM_THREADS|TORCH_HOME|XDG_CACHE_HOME|"
    r"GC_KERNEL_PATH|RDMAV_FORK_SAFE|(https?|no|HTTPS?|NO)_(proxy|PROXY)|"
    r"(SSDCTL|PT_HPU|HABANA|HCCL|NCCL|GLOO|TORCH|UCX|FI|RDMA)_[A-Za-z0-9_]+"
)
# The pods of a job are new each time: no host key is known, and sshd may need a moment.
POD_SSH = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=30"
IN_AN_MPI_JOB = "K_MPI_JOB_ROLE"  # the MPI operator sets it in its pods
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def build(request: Request, node: Node) -> tuple[tuple[str, ...], dict[str, str], str | None]:
    """The command line, the variables it needs, and what the user must still say."""
    config, missing = request.config, None
    if config.rdzv_endpoint is not None:
        raise UsageError("--rdzv-endpoint is torchrun's; mpirun takes --hostfile")
    if ":" in request.command:
        raise UsageError("mpirun reads a lone ':' as its own: it cannot be an argument")
    options = ["-n", str(request.count), *_placement(request, node)]
    options += ["--display", "bind"] if request.open_mpi >= 5 else ["--report-bindings"]
    options += ["--allow-run-as-root"]
    if root := request.environment.get("MPI_ROOT"):
        options += ["--prefix", root]
    if IN_AN_MPI_JOB in request.environment:
        # As options: the operator sets a variable of its own, which wins over one of the manifest.
        is_new = request.open_mpi >= 5
        options += ["--prtemca", "plm_ssh_args"] if is_new else ["--mca", "plm_rsh_args"]
        options += [POD_SSH]
    if config.hostfile is not None:
        _check_hosts(request)
        inert = f"./{config.hostfile}" if config.hostfile.startswith("-") else config.hostfile
        options += ["--hostfile", inert]

    address, port = "127.0.0.1", str(request.free_port)
    if request.hosts:
        address = _first_rank(request)
    elif config.nodes > 1:
        address = request.environment.get("MASTER_ADDR", PLACEHOLDER)
        if address == PLACEHOLDER:
            missing = (
                "mpirun on several nodes needs --hostfile FILE, or MASTER_ADDR in an allocation"
            )
    if config.nodes > 1:
        port = request.environment.get("MASTER_PORT", port)
    _check_address(address, port)
    _check_carried(config.export_env)
    options += ["-x", f"MASTER_ADDR={address}", "-x", f"MASTER_PORT={port}"]
    if config.nodes > 1 or request.hosts:
        present = {**request.environment, **request.settings}
        for name in sorted(n for n in present if CARRIED.fullmatch(n) or n in config.export_env):
            options += ["-x", name]  # by name: mpirun takes the value from its own environment

    argv = ("mpirun", *options, request.python, "-m", "ssdctl", *request.command)
    return argv, dict(request.settings), missing


def _first_rank(request: Request) -> str:
    """The host of rank 0, as others know it: Open MPI begins with its own, wherever that stands."""
    mine = next((host for host in request.hosts if host in request.own_names), None)
    if mine is None:
        return request.hosts[0]
    is_loopback = mine == "localhost" or mine.startswith("127.")
    return request.own_names[0] if is_loopback and len(request.hosts) > 1 else mine


def _placement(request: Request, node: Node) -> list[str]:
    """How ranks share a node's cores: each gets PE of them for itself, near each other."""
    config, ranks = request.config, request.ranks_per_node
    is_new = request.open_mpi >= 5
    cores = config.cores_per_node or node.cores
    share = cores // (config.devices_per_node or ranks)
    if config.nodes == 1 and config.cores_per_node is None and node.sockets > 1:
        # A rank's cores lie in one socket: 3 ranks on 2 x 24 cores can have 12 each, not 16.
        share = min(share, cores // node.sockets // -(-ranks // node.sockets))
    # Gaudi 1.24's notes deprecate `--rank-by core`, and Open MPI 5 lists slot, node, fill and
    # span alone; the images still bring 4.1, which takes both, so the documented one is default.
    rank_by = ["--rank-by", "slot" if is_new else config.rank_by]
    has_cores = node.has_topology or config.cores_per_node is not None
    if config.bind_to == "none" or not has_cores or share < 1:  # nothing to bind to
        unit = "slot" if config.nodes == 1 else f"ppr:{ranks}:node"
        unbound = ["--bind-to", "none", "--map-by"]
        many = [f"{unit}:OVERSUBSCRIBE"] if is_new else [unit, "--oversubscribe"]
        return [*unbound, *many, *rank_by, *_shares(request, cores)]
    # On several nodes `socket` would fill the first node's slots (its cores) with ranks first.
    unit = "package" if is_new else "socket"
    unit = unit if config.nodes == 1 else f"ppr:{ranks}:node"
    return ["--bind-to", "core", "--map-by", f"{unit}:PE={share}", *rank_by]


def _shares(request: Request, cores: int) -> list[str]:
    """What ranks that no binding keeps apart need to know of each other, lest each takes it all."""
    ranks = request.ranks_per_node
    told = ["-x", f"LOCAL_WORLD_SIZE={ranks}"]
    if "OMP_NUM_THREADS" not in request.environment:
        told += ["-x", f"OMP_NUM_THREADS={max(1, cores // ranks)}"]
    return told


def read_version() -> int:
    """The major version of this machine's Open MPI; 4, the Gaudi images', where it has none."""
    try:
        done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 4
    found = re.search(r"Open MPI\) v?(\d+)\.", done.stdout)
    return int(found[1]) if found else 4


def read_hosts(path: Path) -> tuple[str, ...]:
    """The host names of an Open MPI host file (`NAME slots=8`, `#` comments), in its order.

    Raises:
        UsageError: The file cannot be read, is empty, or holds what is no host name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--hostfile {path}: cannot be read: {reason}") from None
    hosts: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not HOST.fullmatch(words[0]):
            raise UsageError(f"--hostfile {path}:{number}: {words[0]!r} is no host name")
        hosts[words[0]] = None
    if not hosts:
        raise UsageError(f"--hostfile {path}: no host in it")
    return tuple(hosts)


def _check_hosts(request: Request) -> None:
    if len(request.hosts) < request.config.nodes:
        raise UsageError(
            f"--nodes {request.config.nodes}, but {request.config.hostfile} "
            f"names {len(request.hosts)} host(s)"
        )


def _check_address(address: str, port: str) -> None:
    if not HOST.fullmatch(address):
        raise UsageError(f"MASTER_ADDR {address!r} is no host name")
    if not re.fullmatch("[0-9]{1,5}", port):
        raise UsageError(f"MASTER_PORT {port!r} is no port")


def _check_carried(names: tuple[str, ...]) -> None:
    for name in names:
        if not VARIABLE.fullmatch(name):
            raise UsageError(f"--export-env {name!r} is not the name of a variable")
