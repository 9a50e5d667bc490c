"""Find the address at which ranks on other machines reach this one. Torch-free."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

SIOCGIFADDR = 0x8915  # requests an interface's IPv4 address (Linux, netdevice(7))
OUTSIDE = "192.0.2.1"  # unassigned (RFC 5737): routed by the default route
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def own_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def own_names() -> tuple[str, ...]:
    """Return the names of this machine; the one that other machines use comes first."""
    name = socket.gethostname()
    return (name, name.partition(".")[0], "localhost", *own_addresses().values())


def free_port() -> int:
    """Return a free TCP port, chosen by the kernel at random."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_for_peers(leader: str, world_size: int) -> str | None:
    """Return the interface that other machines reach, if gloo would choose another one.

    gloo listens at the address of the machine's own name; on many machines that is 127.0.1.1, which
    other machines cannot reach.

    Returns:
        Its name; None if gloo chooses it anyway, or all ranks are on this machine.
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
    """Return the address of this machine that leads to the leader; None if only the loopback does.

    On the leader its own name may resolve to the loopback: then the address of the default route
    is returned.
    """
    candidates = (_address_towards(leader), _address_towards(OUTSIDE))
    return next((a for a in candidates if a and not a.startswith("127.")), None)


def _address_towards(host: str) -> str:
    """Return the source address of packets to a host, or nothing; no packet is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])
    return ""
