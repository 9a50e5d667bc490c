"""Threads follow the CPU quota of the container, here a file tree like that of a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ssdctl.runtime.system import cpu_quota, memory_limit

Run = Callable[..., str]
PROGRAM = """
import contextlib, os, sys
from pathlib import Path
from ssdctl.runtime import system
folder = Path(sys.argv[1])
system.cpu_quota.__defaults__ = (folder / "proc", folder / "sys")
os.sched_getaffinity = lambda _: set(range(64))
"""


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def tree(folder: Path, membership: str) -> tuple[Path, Path]:
    put(folder / "proc/self", cgroup=membership)
    return folder / "proc", folder / "sys"


def test_the_smallest_quota_on_the_path(tmp_path: Path) -> None:
    roots = tree(tmp_path, "0::/pods/one/main")
    groups = tmp_path / "sys/fs/cgroup"
    assert cpu_quota(*roots) is None
    put(groups / "pods/one/main", cpu__max="max 100000", memory__max="max")
    put(groups / "pods/two", cpu__max="1000 100000")
    assert cpu_quota(*roots) is None
    put(groups / "pods/one", cpu__max="150000 100000", memory__max=str(2**31))
    put(groups / "pods", cpu__max="800000 100000", memory__max=str(2**30))
    assert cpu_quota(*roots) == 1.5
    assert memory_limit(*roots) == 2**30
    put(groups, cpu__max="50000 50000")  # in a container the mount itself is the pod's group
    assert cpu_quota(*roots) == 1


def test_version_1_and_malformed_files(tmp_path: Path) -> None:
    roots = tree(tmp_path, "7:memory:/a\n5:cpu,cpuacct:/job/step\n0::/")
    groups = tmp_path / "sys/fs/cgroup/cpu"
    put(groups / "job/step", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(*roots) is None
    put(groups / "job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    put(groups, cpu__cfs_quota_us="100000", cpu__cfs_period_us="0")
    assert cpu_quota(*roots) == 3
    put(tmp_path / "sys/fs/cgroup/memory/a", memory__limit_in_bytes=str(2**31))
    assert memory_limit(*roots) == 2**31
    assert cpu_quota(tmp_path / "none", tmp_path / "none") is None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run code in a process to which 0.8 of a core is granted."""
    tree(tmp_path / "machine", "0::/pod")
    put(tmp_path / "machine/sys/fs/cgroup/pod", cpu__max="80000 100000")

    def run(code: str, **variables: str) -> str:
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        command = [sys.executable, "-c", PROGRAM + code, str(tmp_path / "machine")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def started(command: str) -> str:
    """Return code that runs a command as the shell does and catches its exit."""
    return (
        f"sys.argv = ['ssdctl', *{command.split()!r}]\n"
        "from ssdctl.__main__ import run\n"
        "with contextlib.suppress(SystemExit):\n    run()\n"
    )


TORCH_THREADS = started("config presets --json") + "import torch; print(torch.get_num_threads())"


def test_torch_starts_as_many_threads_as_the_quota(run: Run) -> None:
    assert run(TORCH_THREADS).split()[-1] == "1"
    assert run(TORCH_THREADS, OMP_NUM_THREADS="2").split()[-1] == "2", "the user's number"


def test_the_plan_and_its_decode_threads(run: Run) -> None:
    plan = json.loads(run(started("train --fake-data --dry-run --json")))
    assert (plan["workers"], plan["cpu_quota"]) == (1, 1)
    plan = json.loads(run(started("train --fake-data --dry-run --json --workers 5")))
    assert plan["workers"] == 5
    assert "quota" in run(started("train --fake-data --dry-run"))


def test_ranks_share_the_quota_and_set_their_own_threads(run: Run) -> None:
    plan = json.loads(run(started("launch --cpus 2 --dry-run --json")))
    assert plan["environment"]["OMP_NUM_THREADS"] == "1"
    plan = json.loads(run(started("launch --cpus 2 --dry-run --json"), OMP_NUM_THREADS="2"))
    assert "OMP_NUM_THREADS" not in plan["environment"]
