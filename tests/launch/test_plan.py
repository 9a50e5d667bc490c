"""The command or script for a request: without side effects, so every case compares data."""

import functools
import os
import shlex
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from launch import plans
from launch.plans import SMALL

from ssdctl.config.sections import SlurmConfig
from ssdctl.errors import UsageError
from ssdctl.launch.base import Job, Node, read_node
from ssdctl.launch.engines.mpirun import read_hosts
from ssdctl.launch.engines.torchrun import choose_tpu_device
from ssdctl.runtime.hardware import TPU_VERSIONS
from ssdctl.runtime.system import physical_cores

GAUDI = Node(cores=48, sockets=2)
TPU_V3 = Node(cores=48, sockets=2, tpus=4, tpu=TPU_VERSIONS["v3"])
TPU_V4 = Node(cores=48, sockets=2, tpus=4, tpu=TPU_VERSIONS["v4"])
TWO_HOSTS = {"nodes": 2, "hostfile": "hosts", "hosts": ("a", "b")}
plan_for = functools.partial(plans.plan_for, node=GAUDI, python="python", open_mpi=4)


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
    ("count", "settings", "placement"),
    [
        (8, {}, "ppr:8:node:PE=6"),
        (8, {"node": SMALL, "cores_per_node": 96}, "ppr:8:node:PE=12"),
        (3, {}, "ppr:3:node:PE=12"),  # two ranks share a socket of 24
        (1, {"node": SMALL, "cores_per_node": 48}, "ppr:1:node:PE=24"),
        (8, {"node": Node(4, 1)}, "slot:OVERSUBSCRIBE"),
        (2, {"node": Node(3, 1, has_topology=False)}, "slot:OVERSUBSCRIBE"),
    ],
)
def test_cores_of_a_rank(count: int, settings: dict[str, Any], placement: str) -> None:
    argv = plan_for("hpu", count, **settings).argv
    assert argv[argv.index("--map-by") + 1] == placement
    assert argv[argv.index("--bind-to") + 1] == ("none" if placement.startswith("slot") else "core")


def test_several_gaudi_nodes_take_hosts_and_environment_along() -> None:
    environment = {
        "PYTHONPATH": "a;b",
        "PT_HPU_AUTOLOAD": "0",  # ssdctl sets it, after the shell of a written script
        "SSDCTL_TRAIN__LR": "1",
        "HOME": "/",
        "MPI_ROOT": "/opt/mpi",
        "MINE": "$(x)",
    }
    hosts = {"nodes": 2, "hostfile": "-hosts", "hosts": ("gaudi-0", "gaudi-1")}
    plan = plan_for("hpu", 16, export_env=("MINE",), environment=environment, **hosts)
    line = plan.to_line()
    assert "--prefix /opt/mpi --hostfile ./-hosts -x MASTER_ADDR=gaudi-0 " in line
    assert line.endswith("-x MINE -x PYTHONPATH -x SSDCTL_TRAIN__LR python -m ssdctl train")
    assert plan.missing is None


@pytest.mark.parametrize(
    ("own_index", "hosts", "version_4", "version_5"),
    [
        (1, ("a", "b"), "b", "a"),
        (None, ("a", "b"), "a", "a"),
        (0, ("localhost", "b"), socket.gethostname(), socket.gethostname()),
    ],
)
def test_the_address_of_rank_0(
    own_index: int | None, hosts: tuple[str, ...], version_4: str, version_5: str
) -> None:
    """Open MPI 4 starts it on the launching host if that is listed, 5 on the first listed one."""
    for version, leader in ((4, version_4), (5, version_5), (None, version_5)):
        given_here = {**TWO_HOSTS, "hosts": hosts, "own_index": own_index, "open_mpi": version}
        assert f"-x MASTER_ADDR={leader} " in plan_for("hpu", 16, **given_here).to_line()


def test_ranks_without_binding_are_spread_and_share_the_cores() -> None:
    """mpirun would fill the first node's slots, and each rank would take every core."""
    line = plan_for("hpu", 16, bind_to="none", **TWO_HOSTS).to_line()
    assert "--bind-to none --map-by ppr:8:node:OVERSUBSCRIBE " in line
    assert "-x LOCAL_WORLD_SIZE=8 -x OMP_NUM_THREADS=6 " in line
    assert "-x _SSDCTL_BINDING=none " in line
    assert "LOCAL_WORLD_SIZE" not in plan_for("hpu", 8).to_line()


@pytest.mark.parametrize("device", ["cuda", "xla"])
def test_torchrun_on_one_node(device: str) -> None:
    """Each TPU process takes its chip by torchrun's variables (ssdctl/device/xla.py)."""
    plan = plan_for(device, 4, "train", f"--device={device}")
    assert shlex.join(plan.argv) == (
        "python -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node=4 "
        f"-m ssdctl train --device={device}"
    )
    assert plan.environment["OMP_NUM_THREADS"] == "12"
    assert plan.environment.get("PJRT_DEVICE") == ("TPU" if device == "xla" else None)
    assert plan_for(device, 8, node=SMALL).environment["OMP_NUM_THREADS"] == "1"
    own = {"OMP_NUM_THREADS": "3", "PJRT_DEVICE": "CPU"}
    assert not own.keys() & plan_for(device, 4, environment=own).environment.keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rdzv_endpoint": "n:1"}, {"--rdzv-backend=c10d", "--rdzv-endpoint=n:1"}),
        # torchrun would publish the address of the machine's own name.
        ({"rdzv_endpoint": "n:1", "local_address": "10.0.0.7"}, {"--local-addr=10.0.0.7"}),
        (TWO_HOSTS, {"--rdzv-endpoint=a:29400"}),
        ({**TWO_HOSTS, "hosts": ("fd00::1", "b")}, {"--rdzv-endpoint=[fd00::1]:29400"}),
        ({"environment": {"MASTER_ADDR": "c", "MASTER_PORT": "47"}}, {"--rdzv-endpoint=c:47"}),
        # So rank 0 is in pod 0; torchrun's own order is that of addresses.
        (
            {"environment": {"JOB_COMPLETION_INDEX": "1"}, "rdzv_endpoint": "a-0.a:29400"},
            {"--rdzv-backend=static", "--node-rank=1", "--master-addr=a-0.a"},
        ),
    ],
)
def test_torchrun_on_several_nodes(settings: dict[str, Any], words: set[str]) -> None:
    plan = plan_for("cuda", 16, **{"nodes": 2, **settings})
    assert {"--nnodes=2", "--rdzv-id=ssdctl", "--nproc-per-node=8", *words} <= set(plan.argv)
    assert (plan.num_ranks, plan.missing) == (8, None)
    assert any("local-addr" in word for word in plan.argv) == ("local_address" in settings)


NUMA = {"node": Node(48, 2, has_numactl=True), "torch_version": (2, 9)}


@pytest.mark.parametrize(
    ("device", "settings", "is_bound"),
    [
        ("cuda", {}, True),
        ("cuda", {"torch_version": (2, 8)}, False),  # no such option
        ("cuda", {"node": Node(48, 2)}, False),  # torchrun needs numactl
        ("cuda", {"node": Node(48, 1, has_numactl=True)}, False),
        ("cuda", {"bind_to": "none"}, False),
        ("cpu", {}, False),
    ],
)
def test_ranks_are_next_to_their_gpu(device: str, settings: dict[str, Any], is_bound: bool) -> None:
    assert ("--numa-binding=node" in plan_for(device, 4, **{**NUMA, **settings}).argv) == is_bound


@pytest.mark.parametrize(
    ("settings", "warnings"),
    [
        (TWO_HOSTS, ["--cores-per-node"]),
        ({**TWO_HOSTS, "own_index": 0}, []),
        ({}, []),
        ({"is_written": True, "cores_per_node": 48}, []),
        # Without a local mpirun: the host to start it on.
        ({**TWO_HOSTS, "open_mpi": None, "cores_per_node": 48}, ["start this on a"]),
    ],
)
def test_what_is_assumed_of_other_machines(settings: dict[str, Any], warnings: list[str]) -> None:
    found = plan_for("hpu", 16, **settings).warnings
    assert [word in text for word, text in zip(warnings, found, strict=True)] == [True] * len(found)


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
    ("version", "device", "processes"),
    [("v3", "xla", 1), ("v2", "xla", 1), ("v4", "tpu", 4), ("v6e", "tpu", 4), ("v4", "xla", 4)],
)
def test_a_plan_for_another_host_with_tpus(version: str, device: str, processes: int) -> None:
    plan = plan_for(device, 4, tpu_version=version, is_written=True)
    assert (plan.num_ranks, plan.warnings) == (processes, ())
    assert plan.environment.get("PJRT_DEVICE") == ("TPU" if device == "xla" else None)
    assert ("--tpu" in plan.argv) == (device == "tpu")


def test_chips_and_packages_decide_what_drives_tpus() -> None:
    both = {"torch_tpu", "torch_xla"}
    given = [(TPU_V3, both), (TPU_V4, both), (TPU_V4, {"torch_xla"})]
    assert [choose_tpu_device(None, *facts) for facts in given] == ["xla", "tpu", "xla"]


def test_hosts_of_a_tpu_slice() -> None:
    """Their order is that of their chips, so every host has a number."""
    own, google = (
        plan_for("tpu", 8, node=TPU_V4, **settings)
        for settings in (
            {**TWO_HOSTS, "own_index": 1},
            {"nodes": 2, "environment": {"TPU_WORKER_HOSTNAMES": "c,d"}},
        )
    )
    assert {"--rdzv-backend=static", "--node-rank=1", "--master-addr=a"} <= set(own.argv)
    assert own.environment["TPU_WORKER_HOSTNAMES"] == "a,b"
    assert {"--rdzv-backend=static", "--master-addr=c"} <= set(google.argv)
    assert "TPU_WORKER_HOSTNAMES" not in google.environment


@pytest.mark.parametrize(
    ("device", "count", "settings", "words"),
    [
        ("xla", 8, {"launcher": "mpirun"}, "--launcher mpirun"),
        ("tpu", 4, {"node": TPU_V3}, "--device xla"),
        ("tpu", 4, {"node": TPU_V4, "tpu_version": "v3"}, "TPU v4"),
        ("tpu", 2, {"tpu_version": "v5e", "is_written": True}, "1 or 4 or 8"),
        ("hpu", 8, {"export_env": ("A;B",)}, "--export-env 'A;B'"),
        ("cuda", 8, {"nodes": 2, "rdzv_endpoint": "a;b:1"}, "'a;b:1'"),
        ("hpu", 8, {"nodes": 2, "hostfile": "hosts"}, "--nodes 2"),
        ("cpu", 9, {"nodes": 3, "hostfile": "hosts", "hosts": ("a", "b")}, "--nodes 3"),
        ("hpu", 8, {"nodes": 2, "environment": {"MASTER_ADDR": "-a"}}, "MASTER_ADDR '-a'"),
        # Chips of a host that cannot be used; the hint lists the possible numbers.
        ("xla", 3, {"node": TPU_V3}, "1 or 2 or 4"),
        ("xla", 8, {"node": TPU_V3, "nodes": 2}, "--nodes"),
        ("xla", 2, {"node": TPU_V4, "nodes": 2}, "8"),
        # Arguments that a launcher cannot pass on: a colon separates the programs of mpirun.
        ("cpu", 2, {"command": ("predict", "a\0b")}, "a\\x00b"),
        ("cpu", 2, {"command": ("predict", "\udcff")}, "udcff"),
    ],
)
def test_what_does_not_fit(device: str, count: int, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan_for(device, count, *settings.pop("command", ()), **settings)
    assert words in f"{refused.value} {refused.value.hint}"


HOSTS = ["-oProxyCommand=x", "a;b", "$(x)", "a@b", "`x`", "a" * 254, "a:8", "a[1-2]"]
SLOTS = ["slots=65537", f"slots = {'9' * 5000}", "max_slots=-1", "slots=1e3", "slots="]


def test_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two\nnode-0 slots=8\n\n10.0.0.2 slots=8 # comment\nnode-0\nfd00::1\n")
    assert read_hosts(path) == ("node-0", "10.0.0.2", "fd00::1")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("empty", "absent", "pipe"):
        with pytest.raises(UsageError, match=name):
            read_hosts(tmp_path / name)
    for line in [*HOSTS, *(f"node-1 {slots}" for slots in SLOTS)]:
        path.write_text(f"node-0 slots=65536 max-slots=0\n{line}\n")
        with pytest.raises(UsageError, match="hosts:2: "):
            read_hosts(path)


def test_hyper_threads_and_forbidden_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def node_of(cpus: Iterable[int]) -> Node:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cpus))
        return read_node()

    monkeypatch.setattr(physical_cores, "__defaults__", (tmp_path,))
    assert node_of(range(3)) == Node(cores=3, sockets=1, has_topology=False)
    for cpu in range(8):  # 2 sockets x 2 cores x 2 threads
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{cpu // 2 % 2}\n")
        (topology / "core_id").write_text(f"{cpu % 2}\n")
    assert node_of(range(8)) == Node(cores=4, sockets=2)
    assert node_of([0, 1, 4]) == Node(cores=2, sockets=1)


def slurm_plan(*arguments: Any, slurm: dict[str, Any] | None = None, **more: Any) -> Job:
    settings = SlurmConfig(**(slurm or {}))
    return plans.plan_for(*arguments, launcher="slurm", settings=settings, **more)


def directives(plan: Job) -> list[str]:
    """The options as sbatch reads them: up to the first line that is not a comment."""
    head = plan.text.partition("\nset -u\n")[0]
    return [shlex.split(line)[1] for line in head.splitlines() if "#SBATCH" in line]


def test_options_for_slurm() -> None:
    settings = {"time": "1-00:00:00", "constraint": "[a|b]", "options": ("--output=/logs/%j.out",)}
    plan = slurm_plan("hpu", 16, nodes=2, cores_per_node=48, slurm=settings)
    assert " ".join(directives(plan)) == (
        "--job-name=ssdctl --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=6 "
        "--hint=nomultithread --gres=hpu:8 --constraint=[a|b] --time=1-00:00:00 --signal=USR1@300 "
        "--open-mode=append --requeue --output=/logs/%j.out"
    )
    assert "--gres=gpu:4" in directives(slurm_plan("cuda", 4))
    assert not any("gres" in d for d in directives(slurm_plan("cuda", 4, slurm={"gres": "none"})))


@pytest.mark.parametrize(
    ("time", "is_enough"),
    [
        *(("6", False), ("7", True), ("5:59", False), ("0:06:01", True), ("0-1", True)),
        *(("0", True), ("UNLIMITED", True), ("INFINITE", True)),
    ],
)
def test_a_job_that_would_be_requeued_for_ever_is_refused(time: str, is_enough: bool) -> None:
    """Its ranks would be stopped 300 s before the end, before they had started."""
    if is_enough:
        text = slurm_plan("cuda", 8, slurm={"time": time}).text
        assert f"#SBATCH --time={time}\n" in str(text)
        return
    with pytest.raises(UsageError, match=rf"slurm\.time: {time} "):
        slurm_plan("cuda", 8, slurm={"time": time})
    assert slurm_plan("cuda", 8, slurm={"time": time, "requeue": False}).text
