"""The command for a request: without side effects, so every case compares data."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.errors import UsageError
from ssdctl.launch import kubernetes
from ssdctl.launch.base import LaunchPlan, LaunchRequest, Node, make_plan, read_node
from ssdctl.launch.mpirun import read_hosts
from ssdctl.runtime import hardware

GAUDI = Node(cores=48, sockets=2)
# Valid arguments: any text without NUL and lone surrogates.
ARGUMENTS = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
HOSTILE = ["; rm -rf x", "$(touch x)", "`touch x`", "a\nb", "-x", "--", "", "$$", "${local_rank}"]


def plan_for(
    device: str,
    count: int,
    *command: str,
    node: Node = GAUDI,
    environment: dict[str, str] | None = None,
    hosts: tuple[str, ...] = (),
    own_names: tuple[str, ...] = (),
    open_mpi: int | None = 4,
    local_address: str | None = None,
    torch_version: tuple[int, int] = (2, 6),
    is_planned: bool = False,
    **settings: Any,
) -> LaunchPlan:
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(**settings),
        python="python",
        environment=environment or {},
        hosts=hosts,
        own_names=own_names,
        free_port=40000,
        open_mpi=open_mpi,
        local_address=local_address,
        torch_version=torch_version,
        is_planned=is_planned,
        table=kubernetes.Settings(),
    )
    return make_plan(request, node)


def test_eight_gaudi_cards() -> None:
    """The command of Habana's guide, with the order of ranks that every release accepts."""
    plan = plan_for("hpu", 8, "train", "--bs=128", "--bf16", "--device=hpu")
    assert plan.to_line() == (
        "mpirun -n 8 --bind-to core --map-by ppr:8:node:PE=6 --rank-by slot --report-bindings "
        "--allow-run-as-root -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=40000 "
        "python -m ssdctl train --bs=128 --bf16 --device=hpu"
    )
    assert plan.environment == {}


@pytest.mark.parametrize(
    ("count", "node", "settings", "placement"),
    [
        (8, GAUDI, {}, "ppr:8:node:PE=6"),
        (8, Node(2, 1), {"cores_per_node": 96}, "ppr:8:node:PE=12"),
        (4, GAUDI, {"devices_per_node": 8}, "ppr:4:node:PE=6"),
        (3, GAUDI, {}, "ppr:3:node:PE=12"),  # two ranks share a socket of 24
        (1, GAUDI, {}, "ppr:1:node:PE=24"),
        (1, Node(2, 1), {"cores_per_node": 48}, "ppr:1:node:PE=24"),
        (16, GAUDI, {"nodes": 2}, "ppr:8:node:PE=6"),
        (8, Node(4, 1), {}, "slot:OVERSUBSCRIBE"),
    ],
)
def test_cores_of_a_rank(count: int, node: Node, settings: dict[str, int], placement: str) -> None:
    argv = plan_for("hpu", count, node=node, **settings).argv
    assert argv[argv.index("--map-by") + 1] == placement
    assert argv[argv.index("--bind-to") + 1] == ("none" if placement.startswith("slot") else "core")


def test_several_gaudi_nodes_take_hosts_and_environment_along() -> None:
    environment = {
        "PYTHONPATH": "a;b",
        "SSDCTL_TRAIN__LR": "1",
        "HOME": "/",
        "MPI_ROOT": "/opt/mpi",
        "MINE": "$(x)",
    }
    plan = plan_for(
        "hpu",
        16,
        export_env=("MINE",),
        nodes=2,
        hostfile="-hosts",
        hosts=("gaudi-0", "gaudi-1"),
        environment=environment,
    )
    line = plan.to_line()
    assert "--prefix /opt/mpi --hostfile ./-hosts -x MASTER_ADDR=gaudi-0 " in line
    assert line.endswith("-x MINE -x PYTHONPATH -x SSDCTL_TRAIN__LR python -m ssdctl train")
    assert plan.missing is None


@pytest.mark.parametrize(
    ("own", "hosts", "version_4", "version_5"),
    [
        (("b.site", "b", "localhost"), ("a", "b"), "b", "a"),
        (("login", "localhost"), ("a", "b"), "a", "a"),
        (("a", "localhost", "10.0.0.7"), ("b", "10.0.0.7"), "10.0.0.7", "b"),
        (("a", "localhost"), ("localhost", "b"), "a", "a"),
    ],
)
def test_the_address_of_rank_0(
    own: tuple[str, ...], hosts: tuple[str, ...], version_4: str, version_5: str
) -> None:
    """Open MPI 4 starts it on the launching host if that is listed, 5 on the first listed one."""
    for version, leader in ((4, version_4), (5, version_5), (None, version_5)):
        plan = plan_for(
            "hpu", 16, nodes=2, hostfile="hosts", hosts=hosts, own_names=own, open_mpi=version
        )
        assert f"-x MASTER_ADDR={leader} " in plan.to_line()


def test_ranks_without_binding_are_spread_and_share_the_cores() -> None:
    """mpirun would fill the first node's slots, and each rank would take every core."""
    plan = plan_for("hpu", 16, nodes=2, hosts=("a", "b"), hostfile="hosts", bind_to="none")
    line = plan.to_line()
    assert "--bind-to none --map-by ppr:8:node:OVERSUBSCRIBE " in line
    assert "-x LOCAL_WORLD_SIZE=8 -x OMP_NUM_THREADS=6 " in line
    assert "-x _SSDCTL_BINDING=none " in line
    assert "LOCAL_WORLD_SIZE" not in plan_for("hpu", 8).to_line()


def test_torchrun_on_one_node() -> None:
    plan = plan_for("cuda", 4, "train", "--device=cuda")
    assert shlex.join(plan.argv) == (
        "python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4 "
        "-m ssdctl train --device=cuda"
    )
    assert plan.environment["OMP_NUM_THREADS"] == "12"
    assert plan_for("cpu", 8, node=Node(2, 1)).environment["OMP_NUM_THREADS"] == "1"
    assert (
        "OMP_NUM_THREADS"
        not in plan_for("cpu", 2, environment={"OMP_NUM_THREADS": "3"}).environment
    )


def test_torchrun_on_several_nodes() -> None:
    plan = plan_for("cuda", 16, nodes=2, rdzv_endpoint="node0:29500")
    assert (
        "--nnodes=2 --rdzv-id=ssdctl --rdzv-backend=c10d --rdzv-endpoint=node0:29500"
        in shlex.join(plan.argv)
    )
    assert "--nproc-per-node=8" in plan.argv
    assert plan.num_ranks == 8
    assert plan.missing is None


@pytest.mark.parametrize(("version", "order"), [(4, "core"), (5, "slot"), (None, "slot")])
def test_ranks_by_core_only_with_open_mpi_4(version: int | None, order: str) -> None:
    """Version 5 rejects it; an unknown version gets what both accept."""
    plan = plan_for("hpu", 8, open_mpi=version, rank_by="core")
    assert plan.argv[plan.argv.index("--rank-by") + 1] == order
    assert any("--rank-by" in warning for warning in plan.warnings) == (order == "slot")
    assert "--rank-by slot" in plan_for("hpu", 8, open_mpi=version).to_line()


@pytest.mark.parametrize(
    ("variables", "rank", "address"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, "1", "mine-0.mine"),
        (
            {"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "29500"},
            "0",
            "pod-0",
        ),
    ],
)
def test_nodes_of_torchrun_in_pods_are_ranked_as_their_pods(
    variables: dict[str, str], rank: str, address: str
) -> None:
    """So rank 0 is in pod 0; torchrun's own order is that of addresses."""
    endpoint = {} if "PET_MASTER_ADDR" in variables else {"rdzv_endpoint": "mine-0.mine:29400"}
    argv = plan_for("cuda", 16, nodes=2, environment=variables, **endpoint).argv
    assert {f"--node-rank={rank}", f"--master-addr={address}"} <= set(argv)
    assert "--rdzv-backend=static" in argv


def test_a_plan_without_a_local_mpirun_names_the_host_to_start_it_on() -> None:
    settings: dict[str, Any] = {"nodes": 2, "hostfile": "hosts", "hosts": ("a", "b")}
    settings["cores_per_node"] = 48
    (warning,) = plan_for("hpu", 16, open_mpi=None, **settings).warnings
    assert "start this on a" in warning
    assert plan_for("hpu", 16, open_mpi=5, **settings).warnings == ()


def test_the_address_that_leads_to_the_first_node_is_given_to_torchrun() -> None:
    plan = plan_for("cuda", 16, nodes=2, rdzv_endpoint="node0:29500", local_address="10.0.0.7")
    assert "--local-addr=10.0.0.7" in plan.argv
    plan = plan_for("cuda", 16, nodes=2, rdzv_endpoint="node0:29500")
    assert not any(word.startswith("--local-addr") for word in plan.argv)


@pytest.mark.parametrize(
    ("device", "node", "torch_version", "settings", "is_bound"),
    [
        ("cuda", Node(48, 2, has_numactl=True), (2, 9), {}, True),
        ("cuda", Node(48, 2, has_numactl=True), (2, 8), {}, False),  # no such option
        ("cuda", Node(48, 2), (2, 9), {}, False),  # torchrun needs numactl
        ("cuda", Node(48, 1, has_numactl=True), (2, 9), {}, False),
        ("cuda", Node(48, 2, has_numactl=True), (2, 9), {"bind_to": "none"}, False),
        ("cpu", Node(48, 2, has_numactl=True), (2, 9), {}, False),
    ],
)
def test_ranks_are_bound_next_to_their_gpu(
    device: str,
    node: Node,
    torch_version: tuple[int, int],
    settings: dict[str, Any],
    is_bound: bool,
) -> None:
    plan = plan_for(device, 4, node=node, torch_version=torch_version, **settings)
    assert ("--numa-binding=node" in plan.argv) == is_bound


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"is_planned": True}, True),
        ({"open_mpi": None}, True),
        ({"hosts": ("a", "b"), "hostfile": "hosts", "nodes": 2}, True),
        ({"hosts": ("a", "b"), "hostfile": "hosts", "nodes": 2, "own_names": ("a",)}, False),
        ({}, False),
        ({"is_planned": True, "cores_per_node": 48}, False),
        ({"is_planned": True, "bind_to": "none"}, False),
    ],
)
def test_the_cores_of_other_machines_are_requested(
    settings: dict[str, Any], is_warned: bool
) -> None:
    warnings = plan_for("hpu", 16, **settings).warnings
    assert any("--cores-per-node" in warning for warning in warnings) == is_warned


def test_tpus_are_started_by_torchrun() -> None:
    """Each takes its chip by torchrun's variables (ssdctl/device/xla.py)."""
    plan = plan_for("xla", 4, "train", "--device=xla")
    assert shlex.join(plan.argv) == (
        "python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4 "
        "-m ssdctl train --device=xla"
    )
    assert plan.environment["PJRT_DEVICE"] == "TPU"
    assert "PJRT_DEVICE" not in plan_for("xla", 4, environment={"PJRT_DEVICE": "CPU"}).environment


TPU_V3 = Node(cores=48, sockets=2, tpus=4, has_two_core_tpus=True)
TPU_V4 = Node(cores=48, sockets=2, tpus=4)


@pytest.mark.parametrize(
    ("count", "node", "processes", "chips", "bounds"),
    [
        (1, TPU_V3, 1, "0", "1,1,1"),
        (2, TPU_V3, 1, "0,1", "1,2,1"),
        (4, TPU_V3, 1, "0,1,2,3", "2,2,1"),
        (1, TPU_V4, 1, "0", "1,1,1"),
        (1, GAUDI, 1, "0", "1,1,1"),  # a plan for another machine
        (4, TPU_V4, 4, None, None),
        (8, GAUDI, 8, None, None),
    ],
)
def test_chips_of_a_process(
    count: int, node: Node, processes: int, chips: str | None, bounds: str | None
) -> None:
    """TPU v2 and v3 have two cores a chip, which one process drives; later ones a process each."""
    plan = plan_for("xla", count, "train", node=node)
    assert f"--nproc-per-node={processes}" in plan.argv
    assert plan.num_ranks == processes
    assert plan.environment.get("TPU_VISIBLE_CHIPS") == chips
    assert plan.environment.get("TPU_CHIPS_PER_PROCESS_BOUNDS") == bounds
    assert plan.environment["OMP_NUM_THREADS"] == str(48 // processes)


@pytest.mark.parametrize(
    ("count", "node", "nodes", "possible"),
    [
        (3, TPU_V3, 1, "1 or 2 or 4"),
        (8, TPU_V3, 1, "1 or 2 or 4"),
        (8, TPU_V3, 2, "--nodes"),
        (2, TPU_V4, 1, "1 or 4"),
        (8, TPU_V4, 1, "1 or 4"),
        (2, TPU_V4, 2, "8"),
    ],
)
def test_chips_that_cannot_be_used_are_refused(
    count: int, node: Node, nodes: int, possible: str
) -> None:
    with pytest.raises(UsageError, match="tpus") as refused:
        plan_for("xla", count, "train", node=node, nodes=nodes)
    assert possible in str(refused.value.hint)


def test_the_pci_bus_lists_chips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [("0x1ae0", "0x005e"), ("0x1ae0", "0x0099"), ("0x1ae0", "0x005e"), ("0x10de", "0x0027")]
    monkeypatch.setattr(hardware, "SYS", tmp_path)
    for number, (vendor, device) in enumerate(ids):
        folder = tmp_path / "bus/pci/devices" / str(number)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    node = read_node()
    assert (node.tpus, node.has_two_core_tpus) == (2, False)
    (tmp_path / "bus/pci/devices/0/device").write_text("0x0027\n")
    assert read_node().has_two_core_tpus


def test_torchruns_rendezvous_is_on_the_first_host() -> None:
    plan = plan_for("cuda", 16, nodes=2, hostfile="hosts", hosts=("node-a", "node-b"))
    assert "--rdzv-endpoint=node-a:29400" in plan.argv
    assert plan.missing is None
    plan = plan_for("cuda", 16, nodes=2, hostfile="hosts", hosts=("fd00::1", "fd00::2"))
    assert "--rdzv-endpoint=[fd00::1]:29400" in plan.argv
    allocated = {"MASTER_ADDR": "node-c", "MASTER_PORT": "4711"}
    plan = plan_for("cuda", 16, nodes=2, environment=allocated)
    assert "--rdzv-endpoint=node-c:4711" in plan.argv
    assert plan_for("hpu", 16, nodes=2, environment=allocated).missing is None


@pytest.mark.parametrize("device", ["cuda", "hpu"])
def test_a_host_that_is_still_missing(device: str) -> None:
    missing = plan_for(device, 16, nodes=2).missing
    assert missing is not None
    assert "several nodes" in missing


@pytest.mark.parametrize(
    ("device", "count", "settings", "words"),
    [
        ("hpu", 9, {"nodes": 2}, "do not divide"),
        ("hpu", 8, {"devices_per_node": 4}, "--devices-per-node"),
        ("xla", 8, {"launcher": "mpirun"}, "torchrun's variables"),
        ("xla", 8, {"launcher": "slurm"}, "TPUs"),
        ("cuda", 8, {"launcher": "kubernetes"}, "kubernetes.image"),
        (
            "hpu",
            8,
            {"export_env": ("A;B",)},
            "not the name of a variable",
        ),
        ("cuda", 8, {"rdzv_endpoint": "a:1"}, "several nodes"),
        ("cuda", 8, {"nodes": 2, "rdzv_endpoint": "-a:1"}, "HOST:PORT"),
        ("cuda", 8, {"nodes": 2, "rdzv_endpoint": "a;b:1"}, "HOST:PORT"),
        ("hpu", 8, {"rdzv_endpoint": "a:1"}, "torchrun's"),
        ("hpu", 8, {"nodes": 2, "hostfile": "hosts"}, "names 0 host"),
        ("hpu", 8, {"nodes": 2, "environment": {"MASTER_ADDR": "-a"}}, "MASTER_ADDR '-a'"),
        ("hpu", 8, {"nodes": 2, "environment": {"MASTER_PORT": "1;2"}}, "MASTER_PORT '1;2'"),
    ],
)
def test_what_does_not_fit_is_refused(
    device: str, count: int, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        plan_for(device, count, **settings)


@pytest.mark.parametrize("argument", ["a\0b", "\udcff"])
def test_arguments_that_no_command_line_can_contain(argument: str) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        plan_for("cpu", 2, "train", argument)


def test_mpiruns_own_separator_is_refused() -> None:
    with pytest.raises(UsageError, match="':'"):
        plan_for("hpu", 8, "predict", "ckpt.pt", ":", "rm")


@given(ARGUMENTS)
def test_arguments_survive_the_printed_line(arguments: list[str]) -> None:
    plan = plan_for("hpu", 8, "train", *("a" + argument for argument in arguments))
    assert tuple(shlex.split(plan.to_line())) == plan.argv
    variables = {f"V{number}": argument for number, argument in enumerate(arguments)}
    assigned = [f"{name}={value}" for name, value in variables.items()]
    plan = dataclasses.replace(plan, environment=variables)
    assert shlex.split(plan.to_line()) == [*assigned, *plan.argv]


@given(ARGUMENTS)
def test_arguments_survive_torchruns_template(arguments: list[str]) -> None:
    argv = plan_for("cpu", 2, "train", *arguments).argv
    passed = [Template(a).safe_substitute(local_rank="0") for a in argv]
    assert passed[passed.index("train") + 1 :] == arguments


def test_the_script_runs_what_was_planned(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text('#!/bin/sh\nprintf "%s\\0" "$A" "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    plan = plan_for("hpu", 8, "train", *HOSTILE)
    plan = dataclasses.replace(plan, environment={"A": "$(touch x); b"})
    script = tmp_path / "launch.sh"
    script.write_text(plan.to_script())
    done = subprocess.run(
        ["/bin/bash", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert tuple(done.stdout.decode().split("\0")[:-1]) == ("$(touch x); b", *plan.argv[1:])
    assert not (tmp_path / "x").exists()


def test_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\nnode-0 slots=8\n\n10.0.0.2 slots=8 # comment\nnode-0\nfd00::1\n")
    assert read_hosts(path) == ("node-0", "10.0.0.2", "fd00::1")
    path.write_text("")
    with pytest.raises(UsageError, match="contains no host"):
        read_hosts(path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("absent", "pipe"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_hosts(tmp_path / name)


HOSTS = ["-oProxyCommand=x", "a;b", "$(x)", "a@b", "`x`", "a" * 254, "a:8", "a[1-2]"]
SLOTS = ["slots=65537", f"slots = {'9' * 5000}", "max_slots=-1", "slots=1e3", "slots="]


@pytest.mark.parametrize("line", [*HOSTS, *(f"node-1 {slots}" for slots in SLOTS)])
def test_lines_of_a_host_file_that_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "hosts").write_text(f"node-0 slots=65536 max-slots=0\n{line}\n")
    words = "slots" if line.startswith("node-1") else "host name"
    with pytest.raises(UsageError, match=rf"hosts:2: .*{words}"):
        read_hosts(tmp_path / "hosts")


def test_hyper_threads_and_forbidden_cpus_do_not_count(tmp_path: Path) -> None:
    for cpu in range(8):  # 2 sockets x 2 cores x 2 threads
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert read_node(tmp_path, range(8)) == Node(cores=4, sockets=2)
    assert read_node(tmp_path, [0, 1, 4]) == Node(cores=2, sockets=1)


def test_a_machine_without_topology(tmp_path: Path) -> None:
    node = read_node(tmp_path, range(3))
    assert node == Node(cores=3, sockets=1, has_topology=False)
    argv = plan_for("hpu", 2, node=node).argv
    assert argv[argv.index("--map-by") + 1] == "slot:OVERSUBSCRIBE"
