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
from doctor.machines import Machine, RunDoctor, expect
from helpers import is_alive, wait_for

from ssdctl.config import resolve
from ssdctl.doctor import Doctor
from ssdctl.doctor import machine as doctor_machine
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
    expect(checks["cores"], "ok", "grants 0.5")
    expect(checks["memory"], "warn", "grants 1.0 GiB")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    expect(run_doctor()[1]["cores"], "warn", "OMP_NUM_THREADS is 2")


def test_what_sysfs_lists(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores, NUMA nodes, InfiniBand, and cards, for which there is too little shared memory."""
    for cpu in os.sched_getaffinity(0):
        topology = machine.sys / f"devices/system/cpu/cpu{cpu}/topology"
        machine.put(topology / "physical_package_id", "0")
        machine.put(topology / "core_id", "0")  # all threads of one core
    for node in range(3):
        machine.put(machine.sys / f"devices/system/node/node{node}/cpulist", "0")
    monkeypatch.setattr(doctor_machine, "SHM", Path("/proc"))  # a file system without free space
    _, checks = run_doctor()
    expect(checks["cores"], "ok", "1 physical on 1 socket(s), 3 NUMA node(s)")
    expect(checks["/dev/shm"], "ok")
    assert "infiniband" not in checks
    machine.card(hardware.HABANA)
    ports = machine.sys / "class/infiniband"
    machine.put(ports / "mlx5_0/ports/1/state", "1: DOWN")
    _, checks = run_doctor()
    expect(checks["/dev/shm"], "warn", "--shm-size")
    expect(checks["infiniband"], "warn", "mlx5_0:1 DOWN")
    machine.put(ports / "mlx5_1/ports/1/state", "4: ACTIVE")
    expect(run_doctor()[1]["infiniband"], "ok", "mlx5_0:1 DOWN, mlx5_1:1 ACTIVE")


def test_a_low_limit_of_open_files(machine: Machine) -> None:
    command = shlex.join([sys.executable, "-m", "ssdctl", "doctor", "--json"])
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -S -n 300; ulimit -S -l 64; exec {command}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    expect(checks["open files"], "warn", "300", "ulimit -n")
    expect(checks["locked memory"], "ok", "0.1 MiB")


def test_memory_that_cannot_be_locked_for_rdma(run_doctor: RunDoctor, machine: Machine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        expect(run_doctor()[1]["locked memory"], "ok")
        (machine.sys / "class/infiniband/mlx5_0").mkdir(parents=True)
        expect(run_doctor()[1]["locked memory"], "warn", "memlock")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_launchers(run_doctor: RunDoctor, machine: Machine) -> None:
    code, checks = run_doctor()
    assert code == 0
    for name in ("mpirun", "sbatch", "srun", "kubectl"):
        expect(checks[name], "absent")
    expect(run_doctor("--set", "launch.launcher=kubernetes")[1]["kubectl"], "fail")
    machine.program("mpirun", "[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.3'")
    machine.program("sbatch", "[ $1 = --version ] && printf 'slurm \\033[1m23.02.6\\007'")
    machine.program("kubectl", "echo 'no config' >&2; exit 1")
    code, checks = run_doctor()
    expect(checks["mpirun"], "ok", "mpirun (Open MPI) 5.0.3")
    assert checks["sbatch"]["detail"] == "slurm  23.02.6", "no escapes of others"
    expect(checks["kubectl"], "warn", "no config")
    machine.program("mpirun", "echo 'HYDRA build details: 4.1'")
    expect(run_doctor()[1]["mpirun"], "warn", "HYDRA", "Open MPI")


def test_a_program_that_hangs_is_killed_with_its_children(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_machine, "VERSION_S", 0.5)
    machine.program("srun", f"/bin/sleep 60 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    expect(run_doctor()[1]["srun"], "warn", "within 0.5 s")
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not is_alive(child), timeout_s=5)


def test_a_program_ends_with_an_exception_of_the_main_thread(
    machine: Machine, tmp_path: Path
) -> None:
    child = tmp_path / "child"

    def interrupt(*_: object) -> None:
        if child.is_file() and child.read_text().endswith("\n"):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise RuntimeError("stopped")

    doctor = Doctor(resolve(environment={}).config)
    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        with pytest.raises(RuntimeError, match="stopped"):
            doctor.run(["/bin/sh", "-c", f"echo $$ > {child}; exec /bin/sleep 60"], 50)
    finally:
        doctor.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
    wait_for(lambda: not is_alive(int(child.read_text())), timeout_s=30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_running_probes(machine: Machine, tmp_path: Path, number: int) -> None:
    child = tmp_path / "child"
    machine.program("srun", f"echo $$ > {child}; exec /bin/sleep 60")
    doctor = subprocess.Popen(
        [sys.executable, "-m", "ssdctl", "doctor"], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: child.is_file() and child.read_text().strip(), timeout_s=30)
    time.sleep(0.2)
    doctor.send_signal(number)
    _, err = doctor.communicate(timeout=20)
    assert (doctor.returncode, err.splitlines()[0]) == (75, "stopped; nothing was changed")
    wait_for(lambda: not is_alive(int(child.read_text())), timeout_s=30)
