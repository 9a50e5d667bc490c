"""Python, torch and the packages."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from doctor.machines import CPU, RECORDED, STANDIN, Machine, RunDoctor, expect

from ssdctl import doctor


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import os; os.abort()", "SIGABRT"),
        ("import time; time.sleep(60)", "within 1 s"),
    ],
)
def test_a_broken_torch_leaves_the_rest(
    run_doctor: RunDoctor,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    expected: str,
) -> None:
    machine.torch_is(code)
    monkeypatch.setattr(doctor, "IMPORT_S", 1.0 if "sleep" in code else 30.0)
    start = time.monotonic()
    exit_code, checks = run_doctor()
    assert time.monotonic() - start < 50  # does not wait for the sleep
    assert exit_code == 2
    expect(checks["torch import"], "fail", expected, "pip install")
    expect(checks["memory"], "ok")


def test_a_torch_without_gloo_on_a_cpu_without_compiler_or_bf16(
    run_doctor: RunDoctor, machine: Machine
) -> None:
    cpu = CPU | {"has_native_bf16": False, "compile": ["no C++ compiler"]}
    machine.torch_says(**RECORDED | {"has_gloo": False, "cpu": cpu})
    _, checks = run_doctor()
    expect(checks["torch import"], "warn", "1.5 s", "without gloo")
    expect(checks["cpu"], "ok", "prefer --fp32")
    expect(checks["cpu compile"], "warn", "no C++ compiler", "g++")


def test_versions_are_checked_against_requirements(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.package(machine.packages, "torch", "2.4.0")
    machine.package(machine.packages, "onnx", "1.2.0")
    monkeypatch.syspath_prepend(str(machine.packages))
    code, checks = run_doctor()
    assert code == 2
    expect(checks["torch"], "fail", "2.4.0; ssdctl needs >=2.6", "pip install 'torch>=2.6")
    expect(checks["torchvision"], "warn", "2.4.0")  # it was made for another torch
    assert any(n.startswith("extra ") and "onnx: 1.2.0" in c["detail"] for n, c in checks.items())
    monkeypatch.syspath_prepend(str(STANDIN))
    expect(run_doctor()[1]["torch"], "fail", "vendor's image")


def test_an_extra_that_the_config_needs(run_doctor: RunDoctor, machine: Machine) -> None:
    if any(Path(p, "nvidia", "dali").is_dir() for p in sys.path):
        pytest.skip("nvidia-dali is installed here")
    code, checks = run_doctor("--set", "train.pipeline=dali")
    assert code == 2
    (check,) = (c for name, c in checks.items() if name.startswith("extra dali"))
    expect(check, "fail", "pip install 'nvidia-dali-cuda")
