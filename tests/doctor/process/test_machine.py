"""The machine, its limits and its launchers."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doctor.machines import Machine, RunDoctor, state
from helpers import is_alive

from ssdctl.runtime import hardware


def test_what_a_cgroup_grants(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, checks = run_doctor()
    assert (checks["cores"]["state"], checks["memory"]["state"]) == ("ok", "ok")
    machine.put(machine.proc / "self/cgroup", "0::/pods/one")
    group = machine.sys / "fs/cgroup/pods"
    machine.put(group / "one/cpu.max", "max 100000")
    machine.put(group / "cpu.max", "50000 100000")
    machine.put(group / "one/memory.max", str(2**30))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _, checks = run_doctor()
    assert checks["cores"]["state"] == "ok"
    assert "the cgroup grants 0.5" in checks["cores"]["detail"]
    assert checks["memory"]["state"] == "warn"
    assert "the cgroup grants 1.0 GiB" in checks["memory"]["detail"]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run_doctor()[1]["cores"]["state"] == "warn"


def test_numa_nodes_and_physical_cores(run_doctor: RunDoctor, machine: Machine) -> None:
    for cpu in os.sched_getaffinity(0):
        topology = machine.sys / f"devices/system/cpu/cpu{cpu}/topology"
        machine.put(topology / "physical_package_id", "0")
        machine.put(topology / "core_id", "0")  # all threads of one core
    for node in range(3):
        machine.put(machine.sys / f"devices/system/node/node{node}/cpulist", "0")
    assert "1 physical on 1 socket(s), 3 NUMA node(s)" in run_doctor()[1]["cores"]["detail"]


def test_a_low_limit_of_open_files(machine: Machine) -> None:
    command = shlex.join([sys.executable, "-m", "ssdctl", "doctor", "--json"])
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -S -n 300; ulimit -S -l 64; exec {command}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert state(checks["open files"]) == ("warn", "limit 300")
    assert checks["open files"]["remedy"].startswith("ulimit -n")
    assert checks["locked memory"]["detail"].startswith("limit 0.1 MiB")


def test_memory_that_cannot_be_locked_for_rdma(run_doctor: RunDoctor, machine: Machine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        assert run_doctor()[1]["locked memory"]["state"] == "ok"
        (machine.sys / "class/infiniband/mlx5_0").mkdir(parents=True)
        check = run_doctor()[1]["locked memory"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert check["state"] == "warn"
    assert "memlock" in check["remedy"]


def test_ports_of_infiniband(run_doctor: RunDoctor, machine: Machine) -> None:
    assert "infiniband" not in run_doctor()[1]
    ports = machine.sys / "class/infiniband"
    machine.put(ports / "mlx5_0/ports/1/state", "1: DOWN")
    assert state(run_doctor()[1]["infiniband"]) == ("warn", "mlx5_0:1 DOWN")
    machine.put(ports / "mlx5_1/ports/1/state", "4: ACTIVE")
    assert state(run_doctor()[1]["infiniband"]) == ("ok", "mlx5_0:1 DOWN, mlx5_1:1 ACTIVE")


def test_little_shared_memory_matters_where_cards_are(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdctl.doctor import machine as limits

    monkeypatch.setattr(limits, "SHM", Path("/proc"))  # a file system without free space
    assert run_doctor()[1]["/dev/shm"]["state"] == "ok"
    machine.card(hardware.HABANA)
    check = run_doctor()[1]["/dev/shm"]
    assert check["state"] == "warn"
    assert "--shm-size" in check["remedy"]


def test_launchers(run_doctor: RunDoctor, machine: Machine) -> None:
    code, checks = run_doctor()
    assert code == 0
    for name in ("mpirun", "sbatch", "srun", "kubectl"):
        assert checks[name]["state"] == "absent"
        assert checks[name]["detail"].startswith("not found; for ")
    assert run_doctor("--set", "launch.launcher=kubernetes")[1]["kubectl"]["state"] == "fail"
    machine.program("mpirun", "[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.3'")
    machine.program("sbatch", "[ $1 = --version ] && printf 'slurm \\033[1m23.02.6\\007'")
    machine.program("kubectl", "echo 'no config' >&2; exit 1")
    code, checks = run_doctor()
    assert state(checks["mpirun"]) == ("ok", "mpirun (Open MPI) 5.0.3")
    assert state(checks["sbatch"]) == ("ok", "slurm  23.02.6"), "no escapes of others'"
    assert state(checks["kubectl"]) == ("warn", "does not answer: no config")
    machine.program("mpirun", "echo 'HYDRA build details: 4.1'")
    check = run_doctor()[1]["mpirun"]
    assert check["state"] == "warn"
    assert "Open MPI" in check["remedy"]


def test_a_program_that_hangs_is_killed_with_its_children(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ssdctl.doctor import machine as launchers

    monkeypatch.setattr(launchers, "VERSION_S", 0.5)
    machine.program("srun", f"/bin/sleep 60 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    assert state(run_doctor()[1]["srun"]) == ("warn", "does not answer: no answer within 0.5 s")
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_running_probes(machine: Machine, tmp_path: Path, number: int) -> None:
    machine.program("srun", f"echo $$ > {tmp_path}/child; exec /bin/sleep 60")
    doctor = subprocess.Popen(
        [sys.executable, "-m", "ssdctl", "doctor"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    doctor.send_signal(number)
    _, err = doctor.communicate(timeout=20)
    assert (doctor.returncode, err.splitlines()[0]) == (75, "stopped; nothing was changed")
    child = int((tmp_path / "child").read_text())
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
