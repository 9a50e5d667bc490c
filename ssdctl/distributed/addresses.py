"""Where this machine can be reached by ranks on others. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # asks for an interface's IPv4 address (Linux, netdevice(7))
ELSEWHERE = "192.0.2.1"  # of no machine (RFC 5737): the way to it is the way out
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def own_addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                found[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, asked)[20:24])
    return found


def own_names() -> tuple[str, ...]:
    """What a list of hosts may call this machine; the name that others know it by comes first."""
    name = socket.gethostname()
    return (name, name.partition(".")[0], "localhost", *own_addresses().values())


def interface_for_peers(leader: str, world_size: int) -> str | None:
    """The interface at which ranks on other machines reach this one, where gloo would not find it.

    gloo listens where the machine's own name leads; on many that is 127.0.1.1, where nobody else
    can knock.

    Args:
        leader: MASTER_ADDR.
        world_size: Ranks in all.

    Returns:
        Its name; None where gloo finds it, or all ranks are here.
    """
    if leader == "localhost" or leader.startswith("127."):
        return None
    if any(os.environ.get(name) == str(world_size) for name in LOCAL_SIZES):
        return None
    if not _is_loopback(_address_of(socket.gethostname())):
        return None
    reached = address_for_peers(leader)
    return next((name for name, address in own_addresses().items() if address == reached), None)


def address_for_peers(leader: str) -> str | None:
    """Return the address of this machine that leads to the leader; None if only the loopback does.

    The leader's own name may lead to its loopback: there the address towards other networks counts.
    """
    candidates = (_address_towards(leader), _address_towards(ELSEWHERE))
    return next((a for a in candidates if a and not _is_loopback(a)), None)


def _is_loopback(address: str | None) -> bool:
    return address is None or address.startswith("127.")


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _address_towards(host: str) -> str | None:
    """The address that packets to a host carry as their source; none is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None
