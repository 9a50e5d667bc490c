"""What the system grants: cores, memory, a cache that nobody else can write to."""

import os
from pathlib import Path

import pytest

from ssdctl.runtime import system
from ssdctl.runtime.system import cpu_quota, memory_kills, memory_limit, private_cache_dir

OTHER_USER = 65534


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_the_smallest_quota_on_the_path(tmp_path: Path) -> None:
    roots = tmp_path / "proc", tmp_path / "sys"
    assert (cpu_quota(*roots), memory_limit(*roots), memory_kills(*roots)) == (None, None, 0)
    put(tmp_path / "proc/self", cgroup="0::/pods/one/main")
    groups = tmp_path / "sys/fs/cgroup"
    put(groups / "pods/one/main", cpu__max="max 100000", memory__max="max")
    put(groups / "pods/two", cpu__max="1000 100000")
    assert (cpu_quota(*roots), memory_kills(*roots)) == (None, 0)
    put(groups / "pods/one", cpu__max="150000 100000", memory__max=str(2**31))
    put(groups / "pods", cpu__max="800000 100000", memory__max=str(2**30))
    put(groups / "pods/one/main", memory__events="oom 3\noom_kill 2")
    assert (cpu_quota(*roots), memory_limit(*roots), memory_kills(*roots)) == (1.5, 2**30, 2)
    put(groups, cpu__max="50000 50000")  # in a container the mount itself is the pod's group
    assert cpu_quota(*roots) == 1


def test_cgroups_of_version_1_and_malformed_files(tmp_path: Path) -> None:
    roots = tmp_path / "proc", tmp_path / "sys"
    put(tmp_path / "proc/self", cgroup="7:memory:/a\n5:cpu,cpuacct:/job/step\n0::/")
    groups = tmp_path / "sys/fs/cgroup/cpu"
    put(groups / "job/step", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert cpu_quota(*roots) is None
    put(groups / "job", cpu__cfs_quota_us="300000", cpu__cfs_period_us="100000")
    put(groups, cpu__cfs_quota_us="100000", cpu__cfs_period_us="0")
    assert cpu_quota(*roots) == 3
    put(tmp_path / "sys/fs/cgroup/memory/a", memory__limit_in_bytes=str(2**31))
    assert memory_limit(*roots) == 2**31


def test_ranks_of_a_node_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(48)))
    monkeypatch.setattr(system, "cpu_quota", lambda: None)
    assert system.usable_cores(1) == 48
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert system.usable_cores(16) == 6
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")  # which this site does not bind tasks to
    assert [system.usable_cores(size) for size in (16, 1)] == [4, 48]
    monkeypatch.setattr(system, "cpu_quota", lambda: 19.5)
    assert [system.usable_cores(size) for size in (16, 1)] == [2, 20]


@pytest.mark.parametrize(
    ("quota", "cores"), [(None, None), (0.8, 1), (2.2, 3), (3.5, None), (4.0, None), (9.0, None)]
)
def test_a_quota_counts_if_it_is_below_the_cores(
    quota: float | None, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "cpu_quota", lambda: quota)
    monkeypatch.setattr(
        system, "physical_cores", lambda _: ({(0, core) for core in range(4)}, True)
    )
    assert system.quota_cores() == cores


def test_a_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    assert private_cache_dir("a") is None
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = private_cache_dir("a")
    assert folder.is_relative_to(tmp_path)
    assert private_cache_dir("a") == folder
    root = folder.parent
    root.chmod(0o777)
    assert private_cache_dir("a") is None
    root.chmod(0o700)
    if os.geteuid() == 0:  # only root gives files to other users
        os.chown(root, OTHER_USER, OTHER_USER)
        assert private_cache_dir("a") is None
        os.chown(root, 0, 0)
    root.rename(tmp_path / "mine")
    root.symlink_to(tmp_path / "mine")
    assert private_cache_dir("a") is None
