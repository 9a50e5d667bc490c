"""Python, torch and the packages; the machine, its limits and its launchers."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doctor.machines import STANDIN, Machine, expect
from helpers import is_alive, wait_for

import ssdctl.doctor
from ssdctl.doctor import machine as doctor_machine
from ssdctl.runtime import hardware


def test_a_broken_torch_leaves_the_rest(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.modules / "sitecustomize.py").unlink()  # the real probe, with another torch
    for code, expected in (
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import os; os.abort()", "SIGABRT"),
        ("import time; time.sleep(60)", "within 1 s"),
    ):
        shutil.rmtree(machine.modules / "torch", ignore_errors=True)
        machine.put(machine.modules / "torch" / "__init__.py", code)
        monkeypatch.setattr(ssdctl.doctor, "IMPORT_S", 1.0 if "sleep" in code else 30.0)
        start = time.monotonic()
        checks = machine.doctor(code=2)
        assert time.monotonic() - start < 50  # does not wait for the sleep
        expect(checks["torch import"], "fail", expected, "pip install")
        expect(checks["memory"], "ok")


def test_a_torch_without_gloo(machine: Machine) -> None:
    machine.torch_says(has_gloo=False)
    machine.expect("torch import", "warn", "1.5 s", "without gloo")


def test_versions_are_those_required(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.package("torch", "2.4.0")
    machine.use_packages()
    checks = machine.doctor(code=2)
    expect(checks["torch"], "fail", "2.4.0; ssdctl needs >=2.6", "pip install 'torch>=2.6")
    monkeypatch.syspath_prepend(str(STANDIN))
    machine.expect("torch", "fail", "vendor's image")


def test_what_a_cgroup_grants(machine: Machine) -> None:
    checks = machine.doctor()
    assert (checks["cores"]["state"], checks["memory"]["state"]) == ("ok", "ok")
    machine.put(machine.proc / "self/cgroup", "0::/pods/one")
    group = machine.sys / "fs/cgroup/pods"
    machine.put(group / "one/cpu.max", "max 100000")
    machine.put(group / "cpu.max", "50000 100000")
    machine.put(group / "one/memory.max", str(2**30))
    checks = machine.doctor()
    expect(checks["cores"], "ok", "grants 0.5")
    expect(checks["memory"], "warn", "grants 1.0 GiB")


def test_a_driver_that_hangs_is_killed_with_its_children(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.card(hardware.NVIDIA, kind="0x030200")
    machine.program("nvidia-smi", f"/bin/sleep 60 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setattr(doctor_machine, "DRIVER_S", 0.5)
    start = time.monotonic()
    machine.expect("cuda", "warn", "within 0.5 s")
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    wait_for(lambda: not is_alive(child), timeout_s=5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_self_test", [False, True])  # which runs in the main thread
def test_a_signal_ends_running_programs(
    machine: Machine, tmp_path: Path, number: int, is_self_test: bool
) -> None:
    child, command = tmp_path / "child", [sys.executable, "-m", "ssdctl", "doctor"]
    if is_self_test:
        write = f"open({str(child)!r}, 'w').write(str(os.getpid()))"
        machine.probe_prints("ranks", "", f"import time; {write}; time.sleep(60)")
        command.append("--self-test")
    else:
        machine.program("nvidia-smi", f"echo $$ > {child}; exec /bin/sleep 60")
    doctor = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: child.is_file() and child.read_text().strip(), timeout_s=30)
    time.sleep(0.2)
    doctor.send_signal(number)
    _, err = doctor.communicate(timeout=20)
    assert doctor.returncode == 75
    assert "stopped; nothing was changed" in err
    wait_for(lambda: not is_alive(int(child.read_text())), timeout_s=30)
