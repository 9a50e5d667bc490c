"""Commands on other machines: in a container with a CPU quota (here a file tree), busy ones, and one
with broken shared libraries."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., str]
UNSET = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT")


def run_code(code: str, *arguments: object, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in UNSET}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def started(command: str) -> str:
    """Return code that runs a command as the shell does and catches its exit."""
    return (
        "import contextlib, os, sys\n"
        f"sys.argv = ['ssdctl', *{command.split()!r}]\n"
        "from ssdctl.__main__ import run\n"
        "with contextlib.suppress(SystemExit):\n    run()\n"
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run code in a process to which 0.8 of a core is granted."""
    for path, text in (
        ("proc/self/cgroup", "0::/pod"),
        ("sys/fs/cgroup/pod/cpu.max", "80000 100000"),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    grant = (
        "import os\nfrom pathlib import Path\nfrom ssdctl.runtime import system\n"
        f"system.cpu_quota.__defaults__ = Path({str(tmp_path)!r}, 'proc'), Path({str(tmp_path)!r}, 'sys')\n"
        "os.sched_getaffinity = lambda _: set(range(64))\n"
    )
    return lambda code, **variables: run_code(grant + code, **variables)


def test_threads_follow_the_quota(run: Run) -> None:
    torch = started("config presets --json") + "import torch; print(torch.get_num_threads())"
    assert run(torch).split()[-1] == "1"
    assert run(torch, OMP_NUM_THREADS="2").split()[-1] == "2", "the user's number"
    plan = json.loads(run(started("train --fake-data --dry-run --json")))
    assert (plan["workers"], plan["cpu_quota"]) == (1, 1)
    plan = json.loads(run(started("train --fake-data --dry-run --json --workers 5")))
    assert plan["workers"] == 5
    assert "quota" in run(started("train --fake-data --dry-run"))


def test_ranks_share_the_quota_and_set_their_own_threads(run: Run) -> None:
    launch = started("launch --cpus 2 --dry-run --json")
    assert json.loads(run(launch))["environment"]["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in json.loads(run(launch, OMP_NUM_THREADS="2"))["environment"]


def spins(load: float, **variables: str) -> str:
    """Return the variable of libgomp after the start of a command."""
    code = f"import os\nos.getloadavg = lambda: ({load}, 0, 0)\n" + started("config presets --json")
    code += "assert 'torch' not in sys.modules, 'too late for libgomp'\n"
    return run_code(code + "print(os.environ.get('GOMP_SPINCOUNT'))", **variables).split()[-1]


def test_threads_wait_less_actively_and_least_on_a_busy_machine() -> None:
    cores = os.cpu_count() or 1
    idle, busy = int(spins(0.5 * cores)), int(spins(3 * cores))
    assert 0 < busy < idle < 300_000
    assert (spins(0, GOMP_SPINCOUNT="7"), spins(0, OMP_WAIT_POLICY="7")) == ("7", "None")


@pytest.mark.parametrize(
    "command", [["train", "--fake-data", "--steps", "1"], ["doctor", "--json"]]
)
def test_a_wrong_library_path_is_named(tmp_path: Path, command: list[str]) -> None:
    library = tmp_path / "lib/libstdc++.so.6"
    library.parent.mkdir()
    library.touch()
    argv = [sys.executable, "-m", "ssdctl", *command]
    env = os.environ | {"LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    words = done.stderr
    if command[0] == "doctor":  # the other checks are made
        checks = {check["name"]: check for check in json.loads(done.stdout)}
        assert checks["memory"]["state"] == "ok"
        assert checks["torch import"]["state"] == "fail"
        words = checks["data"]["detail"] + checks["data"]["remedy"]
    assert str(library) in words
    assert "LD_LIBRARY_PATH" in words


@pytest.mark.parametrize("spare_mb", [20, 200])  # for packages, for the network
def test_memory_that_runs_out_is_named(spare_mb: int, tmp_path: Path) -> None:
    limit = (
        "import resource, sys, torch\nfrom ssdctl.runtime.system import PROC, read_table, table_bytes\n"
        f"size = table_bytes(read_table(PROC / 'self/status'), 'VmSize') + ({spare_mb} << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size, size))\nfrom ssdctl.__main__ import run\nrun()"
    )
    options = ["--fake-data", "--backbone-weights", "none", "--bs", "64", "--workers", "0"]
    argv = [sys.executable, "-c", limit, "train", *options]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "(ulimit -v)" in done.stderr) == (2, True), done.stderr
