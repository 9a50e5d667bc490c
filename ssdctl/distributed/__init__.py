"""The rank of this process in a run, and the address at which other ranks reach it.

The rank comes from a process group that the caller has made, else from torchrun's, Open MPI's or
Slurm's variables; without them the process is the only one. So is the shell of an `sbatch` script:
Slurm sets its rank to 0 of all tasks, but only `srun` starts the tasks, and those have a step id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssdctl.errors import UsageError

RANK_VARIABLES = (  # rank, world size, local rank
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
RANK_NUMBERS = tuple(dict.fromkeys(rank for rank, _, _ in RANK_VARIABLES))
SLURM_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
HINT = "unset these variables to use a single process; ssdctl launch sets them for ranks"
SIOCGIFADDR = 0x8915  # requests an interface's IPv4 address (Linux, netdevice(7))
OUTSIDE = "192.0.2.1"  # unassigned (RFC 5737): routed by the default route


class Ranks(NamedTuple):
    """The number of this process among all processes of a run."""

    rank: int
    world_size: int
    local_rank: int

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files and the terminal output."""
        return self.rank == 0

    @property
    def is_single_process(self) -> bool:
        return self.world_size == 1


SINGLE_PROCESS = Ranks(0, 1, 0)


def find_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """Return the rank of this process.

    Raises:
        UsageError: The variables contradict each other.
    """
    joined = sys.modules.get("torch.distributed") if environment is None else None
    if joined is not None and joined.is_available() and joined.is_initialized():
        local_rank = os.environ.get("LOCAL_RANK", "")
        rank, size = joined.get_rank(), joined.get_world_size()
        return Ranks(rank, size, int(local_rank) if local_rank.isdecimal() else rank)
    environment = os.environ if environment is None else environment
    for names in RANK_VARIABLES:
        given = {name: environment[name] for name in names if name in environment}
        if not {*names[:2]} <= given.keys():
            continue
        # The shell of a batch script has a rank, but no step.
        is_step = not environment.keys().isdisjoint(SLURM_STEP_VARIABLES)
        if given.get("SLURM_PROCID") == "0" and not is_step:
            continue
        try:
            rank, size, local = (int(given.get(name, "0")) for name in names)
        except ValueError:
            values = " ".join(f"{name}={value!r}" for name, value in given.items())
            raise UsageError(f"{values}: not a number", hint=HINT) from None
        if not 0 <= rank < size:
            raise UsageError(f"{names[0]}={rank} is not below {names[1]}={size}", hint=HINT)
        return Ranks(rank, size, local)
    return SINGLE_PROCESS


def require_port() -> None:
    """Raise UsageError unless the variable is set that says where the ranks meet."""
    if "MASTER_PORT" not in os.environ:
        raise UsageError("MASTER_PORT is not set", hint="start the ranks with ssdctl launch")


def own_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def find_own(hosts: Sequence[str]) -> int | None:
    """Return the index of this machine in a list of hosts: by its name, else by its addresses."""
    own = socket.gethostname()
    for index, host in enumerate(hosts):
        if host in (own, own.partition(".")[0]):
            return index
    for index, host in enumerate(hosts):
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM) if host else []
        except (OSError, ValueError) as error:  # ValueError: longer than a name can be
            if getattr(error, "errno", None) == socket.EAI_AGAIN:
                return None  # no name server answers, which takes seconds per name
            continue
        for family, kind, *_, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)  # only addresses of this machine can be bound
                return index
    return None


def free_port() -> int:
    """Return a free TCP port, chosen by the kernel at random."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_for_peers(leader: str, world_size: int) -> str | None:
    """Return the interface that other machines reach; None if gloo chooses a good one itself.

    gloo listens at the address of the machine's own name; on many machines that is 127.0.1.1, which
    other machines cannot reach.
    """
    is_one_machine = any(os.environ.get(name) == str(world_size) for name in LOCAL_SIZES)
    if is_one_machine or leader == "localhost" or leader.startswith("127."):
        return None
    with contextlib.suppress(OSError):
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return None
    reached = address_for_peers(leader)
    return next((name for name, address in own_addresses().items() if address == reached), None)


def address_for_peers(leader: str) -> str | None:
    """Return this machine's address on the route to the leader; None if it is only the loopback.

    On the leader its own name may resolve to the loopback: then the address of the default route
    is returned.
    """
    for host in (leader, OUTSIDE):
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends no packet
            address = str(probe.getsockname()[0])
            if not address.startswith("127."):
                return address
    return None
