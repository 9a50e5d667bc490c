"""The addresses of this machine for others, and the cores of a rank."""

from __future__ import annotations

import os
import socket

import pytest

from ssdctl.distributed.ranks import interface_for_peers, own_addresses, own_names
from ssdctl.runtime.system import usable_cores


def test_own_names_and_addresses() -> None:
    assert own_addresses()["lo"] == "127.0.0.1"
    assert own_names()[0] == socket.gethostname()
    assert "127.0.0.1" in own_names()


@pytest.mark.parametrize("leader", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_on_one_machine_the_loopback_is_right(leader: str) -> None:
    assert interface_for_peers(leader, 2) is None


def test_between_machines_only_a_name_that_resolves_to_loopback_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two network namespaces try it for real: tests/launch/process/test_engines.py."""
    outward = [name for name, address in own_addresses().items() if address != "127.0.0.1"]
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.1.2.3")
    assert interface_for_peers("192.0.2.7", 2) is None
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert interface_for_peers("192.0.2.7", 2) in (*outward, None)  # None: no way out of here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert interface_for_peers("192.0.2.7", 2) is None


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)))
    quota: list[float | None] = [None]
    monkeypatch.setattr("ssdctl.runtime.system.cpu_quota", lambda: quota[0])
    assert usable_cores(1) == 48
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert usable_cores(16) == 6
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")  # which this site does not bind tasks to
    assert usable_cores(16) == 4
    assert usable_cores(1) == 48
    quota[0] = 19.5
    assert usable_cores(1) == 20
    assert usable_cores(16) == 2
