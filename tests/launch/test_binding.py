"""Which cores the ranks of a node get: from Open MPI, and in the rank itself from its card's NUMA
node. Nothing is launched; the topology of the machine is synthetic."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch.open_mpi import MPIRUNS, environment_for
from launch.plans import plan_for

from ssdctl.runtime import hardware
from ssdctl.runtime.hardware import cpus_of_rank, numa_nodes_of_cards

TWO_SOCKETS = {"HWLOC_SYNTHETIC": "pack:2 numa:1 core:24 pu:2", "HWLOC_THISSYSTEM": "1"}


def cores_of_ranks(output: str) -> list[list[int]]:
    """Return the cores of each rank from Open MPI's map, of version 4 or 5, in its order."""
    found = []
    for binding in re.findall(r"Binding: (\S+)", output):
        if match := re.search(r"core:L(\d+)-(\d+)", binding):
            found.append(list(range(int(match[1]), int(match[2]) + 1)))
        else:
            cores = re.sub(r"[\[\]]+", "/", binding).strip("/").split("/")
            found.append([n for n, core in enumerate(cores) if "B" in core])
    return found


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3, 4, 8])
@pytest.mark.parametrize("launcher", MPIRUNS)
def test_open_mpi_gives_adjacent_cores_to_adjacent_ranks(
    launcher: str, ranks: int, nodes: int, tmp_path: Path
) -> None:
    _, variables = environment_for(launcher)
    hosts = tuple(f"host{n}" for n in range(nodes))
    settings = {"launcher": "mpirun", "nodes": nodes, "cores_per_node": 48, "hostfile": "hosts"}
    version = int(launcher[-1])
    argv = plan_for("hpu", ranks * nodes, hosts=hosts, open_mpi=version, **settings).argv
    (tmp_path / "hosts").write_text("".join(f"{host} slots=8\n" for host in hosts))
    show = ["--display-devel-map"] if launcher == "mpirun-4" else ["--display", "map-devel"]
    argv = (argv[0], *show, "--do-not-launch", *argv[1:])
    env = {**os.environ, **variables, **TWO_SOCKETS}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    share = {1: 24, 3: 12, 4: 12, 8: 6}[ranks]
    of_a_node = [list(range(rank * share, (rank + 1) * share)) for rank in range(ranks)]
    assert cores_of_ranks(done.stdout + done.stderr) == of_a_node * nodes, done.stderr


@pytest.fixture
def gaudi_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Eight cards on two NUMA nodes of 24 cores with two threads each, as on Voyager."""
    monkeypatch.setattr(hardware, "SYS", tmp_path)
    monkeypatch.delenv("HABANA_VISIBLE_MODULES", raising=False)

    def put(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    for card in range(8):
        put(f"class/accel/accel{card}/device/module_id", 7 - card)
        put(f"class/accel/accel{card}/device/numa_node", int(card < 4))
    for node, cpus in ((0, "0-23,48-71"), (1, "24-47,72-95")):
        put(f"devices/system/node/node{node}/cpulist", cpus)
    for cpu in range(96):
        put(f"cpu/cpu{cpu}/topology/physical_package_id", cpu // 24 % 2)
        put(f"cpu/cpu{cpu}/topology/core_id", cpu % 24)
    return tmp_path / "cpu"


@pytest.mark.parametrize("size", [1, 3, 4, 8])
def test_a_rank_takes_cores_next_to_its_card(gaudi_node: Path, size: int) -> None:
    nodes = numa_nodes_of_cards("hpu")
    share = 24 // min(size, 4)
    for rank in range(size):
        cpus = cpus_of_rank(nodes, rank, size, gaudi_node)
        first = rank * share
        assert cpus == {*range(first, first + share), *range(first + 48, first + 48 + share)}
    assert cpus_of_rank(nodes, 0, 9, gaudi_node) == set()


def test_a_rank_binds_itself(gaudi_node: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from ssdctl.runtime import hardware\n"
        "hardware.SYS = Path(sys.argv[1])\n"
        "first = min(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, {first})\n"
        "hardware.bind_to_card('hpu', 0); print(sorted(os.sched_getaffinity(0)))\n"
    )
    cpus = sorted(os.sched_getaffinity(0))[:2]
    text = ",".join(map(str, cpus))
    (gaudi_node.parent / "devices/system/node/node0/cpulist").write_text(text)
    argv = [sys.executable, "-c", code, str(gaudi_node.parent)]

    def bound(**variables: str) -> str:
        environment = {**os.environ, **variables}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert bound(LOCAL_WORLD_SIZE="1") == str(cpus), "mpirun may have bound it elsewhere"
    assert bound(LOCAL_WORLD_SIZE="1", _SSDCTL_BINDING="none") == str(cpus[:1])
    assert bound() == str(cpus[:1]), "a single process uses all of its cores"
