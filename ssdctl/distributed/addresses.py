"""Addresses at which ranks on other machines reach this one. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # returns an interface's IPv4 address (Linux, netdevice(7))
OUTSIDE = "192.0.2.1"  # of no machine (RFC 5737): its route is the default route
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def own_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
    return addresses


def own_names() -> tuple[str, ...]:
    """Return the names and addresses by which a host list may name this machine, hostname first."""
    name = socket.gethostname()
    return (name, name.partition(".")[0], "localhost", *own_addresses().values())


def interface_for_peers(leader: str, world_size: int) -> str | None:
    """Return the interface at which ranks on other machines reach this one, if gloo needs it.

    gloo listens at the address of the machine's own name; on many that is 127.0.1.1, which other
    machines cannot reach.

    Args:
        leader: MASTER_ADDR.
        world_size: Number of ranks.

    Returns:
        Its name; None if gloo finds it, or all ranks are on this machine.
    """
    if leader == "localhost" or leader.startswith("127."):
        return None
    if any(os.environ.get(name) == str(world_size) for name in LOCAL_SIZES):
        return None
    if not _is_loopback(_address_of(socket.gethostname())):
        return None
    # On the leader itself its name may resolve to the loopback address too.
    sources = (_address_towards(leader), _address_towards(OUTSIDE))
    source = next((a for a in sources if a and not _is_loopback(a)), None)
    return next((name for name, address in own_addresses().items() if address == source), None)


def _is_loopback(address: str | None) -> bool:
    return address is None or address.startswith("127.")


def _address_of(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _address_towards(host: str) -> str | None:
    """Return the source address of packets to a host; none is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return None
