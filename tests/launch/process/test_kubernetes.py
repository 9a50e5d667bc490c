"""The script that installs ssdctl in a pod: this interpreter replaces the image's."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ssdctl.launch.engines._manifest import INSTALL

ENVIRONMENT = {**os.environ, "PIP_NO_INDEX": "1", "PYTHONPATH": ""}  # nothing is fetched
needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
INFO = "probe_package-1.0.dist-info"
METADATA = "Metadata-Version: 2.1\nName: probe-package\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install(folder: Path, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Install a package `probe_package` with nothing in it but its needs."""
    folder.mkdir(exist_ok=True)
    path = folder / "probe_package-1.0-py3-none-any.whl"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requirements)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("probe_package.py", "")
        file.writestr(f"{INFO}/METADATA", METADATA + needs)
        file.writestr(f"{INFO}/WHEEL", WHEEL)
        file.writestr(f"{INFO}/RECORD", "")
    argv = ["/bin/sh", "-c", INSTALL, sys.executable, str(folder / "made"), str(path)]
    return subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True)


def origins(folder: Path, *modules: str) -> list[str]:
    """Return the files of modules, as the interpreter of an installation finds them."""
    code = "import importlib.util as u, sys; print(*(u.find_spec(n).origin for n in sys.argv[1:]))"
    argv = [str(folder / "made/bin/python"), "-c", code, *modules]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@needs_pip
def test_the_pods_installation_keeps_the_images_torch(tmp_path: Path) -> None:
    done = install(tmp_path / "good", "torch>=2.6.0a0", "numpy")
    assert done.returncode == 0, done.stderr
    torch, package = origins(tmp_path / "good", "torch", "probe_package")
    spec = importlib.util.find_spec("torch")
    assert torch == spec.origin
    assert package.startswith(str(tmp_path / "good"))
    # A package that needs another torch is refused.
    assert install(tmp_path / "bad", "torch>=99").returncode != 0
