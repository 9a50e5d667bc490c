"""Python, torch and the packages."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from doctor.machines import CPU, RECORDED, STANDIN, Machine, RunDoctor, state

from ssdctl.doctor import run_checks


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
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
    monkeypatch.setattr(run_checks, "IMPORT_S", 1.0 if "sleep" in code else 30.0)
    start = time.monotonic()
    code_, checks = run_doctor()
    assert time.monotonic() - start < 50  # does not wait for the sleep
    assert code_ == 2
    assert checks["torch import"]["state"] == "fail"
    assert expected in checks["torch import"]["detail"]
    assert "pip install" in checks["torch import"]["remedy"]
    assert checks["memory"]["state"] == "ok"


def test_a_torch_without_gloo(run_doctor: RunDoctor, machine: Machine) -> None:
    machine.torch_says(**RECORDED | {"has_gloo": False})
    check = run_doctor()[1]["torch import"]
    assert state(check) == ("warn", "1.5 s; built without gloo")


def test_a_cpu_without_compiler_or_bf16(run_doctor: RunDoctor, machine: Machine) -> None:
    cpu = CPU | {"has_native_bf16": False, "compile": ["no C++ compiler"]}
    machine.torch_says(**RECORDED | {"cpu": cpu})
    _, checks = run_doctor()
    assert "bf16 works but slowly" in checks["cpu"]["detail"]
    assert state(checks["cpu compile"]) == ("warn", "no C++ compiler")


def test_versions_are_checked_against_requirements(
    run_doctor: RunDoctor, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, version: str) -> None:
        folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
        machine.put(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")

    put("torch", "2.4.0")
    put("onnx", "1.2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    code, checks = run_doctor()
    assert code == 2
    assert checks["torch"]["state"] == "fail"
    assert "2.4.0; ssdctl needs >=2.6" in checks["torch"]["detail"]
    assert checks["torch"]["remedy"].startswith("pip install 'torch>=2.6")
    assert state(checks["torchvision"])[0] == "warn", "it was made for another torch"
    assert any(n.startswith("extra ") and "onnx: 1.2.0" in c["detail"] for n, c in checks.items())
    monkeypatch.syspath_prepend(str(STANDIN))
    assert "vendor's image" in run_doctor()[1]["torch"]["remedy"]


def test_an_extra_that_the_config_needs(run_doctor: RunDoctor, machine: Machine) -> None:
    if any(Path(p, "nvidia", "dali").is_dir() for p in sys.path):
        pytest.skip("nvidia-dali is installed here")
    code, checks = run_doctor("--set", "train.pipeline=dali")
    assert code == 2
    (check,) = (c for name, c in checks.items() if name.startswith("extra dali"))
    assert state(check)[0] == "fail"
    assert "pip install 'nvidia-dali-cuda" in check["remedy"]
