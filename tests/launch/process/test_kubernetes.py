"""Manifests: checked against the MPI operator's own schema, and read back as Kubernetes reads them.

There is no cluster: `kubectl` is a small program that records its calls.
golden/mpijob-v2beta1.json is the schema of kubeflow.org/v2beta1 MPIJobs, golden/kubernetes-jobs.json
that of TrainJobs (Kubeflow Trainer 2.3) and of batch/v1's JobSpec, as its runtimes embed it: without
descriptions, and without the parts of pods that the first one has.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ssdctl.launch import _pod_install

IN_A_POD = ["--cpus", 1, "--launcher", "kubernetes", "--out", "/runs/first"]


IN_A_POD += ["--set", "kubernetes.image=a", "--set", "kubernetes.install=image"]


IN_A_POD += ["--set", "kubernetes.volumes=claim:/runs", "--set", "kubernetes.namespace=me"]


def wheel(folder: Path, *requirements: str) -> Path:
    """A package `probe_package` with nothing in it but its needs."""
    path = folder / "probe_package-1.0-py3-none-any.whl"
    info = "probe_package-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("probe_package.py", "")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: probe-package\nVersion: 1.0\n{needs}"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_the_pods_installation_keeps_the_images_torch(tmp_path: Path) -> None:
    """This interpreter replaces the image's; nothing is fetched."""
    program = _pod_install.__file__
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": ""}

    def install(source: Path, where: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, program, str(tmp_path / where), str(source)]
        return subprocess.run(argv, env=environment, capture_output=True, text=True)

    done = install(wheel(tmp_path, "torch>=2.6.0a0", "numpy"), "good")
    assert done.returncode == 0, done.stderr
    find = "import importlib.util as u; print(*(u.find_spec(n).origin for n in ('torch', 'probe_package')))"
    argv = [str(tmp_path / "good/bin/python"), "-c", find]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    torch, package = result.stdout.split()
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert torch == spec.origin
    assert package.startswith(str(tmp_path / "good"))
    # A package that needs another torch is refused.
    assert install(wheel(tmp_path, "torch>=99"), "bad").returncode != 0


def with_pip(version: str) -> str | None:
    """An interpreter of that version that has pip, from the path or from pyenv's folder."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path("~/.pyenv").expanduser(), "versions")
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in filter(None, candidates):
        argv = [str(candidate), "-c", "import pip, sys; print(*sys.version_info[:2], sep='.')"]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.stdout.strip() == version:
            return str(candidate)
    return None


def test_the_pods_installation_on_python_3_10(tmp_path: Path) -> None:
    """Gaudi's images on Ubuntu 22.04 bring it."""
    python = with_pip("3.10")
    if python is None:
        pytest.skip("needs a Python 3.10 with pip")
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": ""}
    source = wheel(tmp_path, "pip")
    argv = [python, _pod_install.__file__, str(tmp_path / "made"), str(source)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    argv = [
        str(tmp_path / "made/bin/python"),
        "-c",
        "import pip, probe_package as p; print(p.__file__)",
    ]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.startswith(str(tmp_path / "made"))


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_the_pods_installation_ends_on_sigterm(tmp_path: Path) -> None:
    """It has its own handler: 143; without one a signal gives -15."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/probe_package-1.0-py3-none-any.whl"
        argv = [sys.executable, _pod_install.__file__, str(tmp_path / "made"), url]
        environment = {**os.environ, "no_proxy": "*", "PYTHONPATH": ""}
        with subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL) as process:
            connection, _ = silent.accept()  # pip waits for an answer now
            with connection:
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=60) == 143
