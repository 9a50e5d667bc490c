"""Files of gigabytes where small ones belong: one error, little memory.

The large files are sparse: they take no space and no time to write.
"""

import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Cli, Result
from data.formats import exports
from reporting.test_damaged_runs import make_run

HUGE_BYTES = 5 << 30
MAX_GROWTH_BYTES = 200 << 20


def enlarge(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.truncate(path, HUGE_BYTES)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth * 1024 < MAX_GROWTH_BYTES


def refuse(result: Result, code: int, name: str) -> None:
    result.expect(code, name, "limit")
    assert len(result.err) < 1500


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (exports.voc_lists, "Annotations/*.xml"),
        (exports.roboflow_yolo, "data.yaml"),
        (exports.open_images, "*class*.csv"),
        (exports.coco_toml, "dataset.toml"),
    ],
)
def test_annotations(make: Callable[[Path], Path], name: str, cli: Cli) -> None:
    data = make(Path("data"))
    path = min(Path("data").glob(name))
    enlarge(path)  # it is still recognized
    refuse(cli("prepare", "--data", data, "--store", "store"), 3, path.name)
    assert not Path("store").exists()


def test_manifest_and_host_file(cli: Cli) -> None:
    enlarge(Path("large"))
    refuse(cli("download", "--dest", "x", "--manifest", "large", "--dry-run"), 2, "large")
    hosts = ("--nodes", 2, "--launcher", "mpirun", "--hostfile", "large")
    refuse(cli("launch", "--cpus", 2, *hosts, "--dry-run"), 2, "large")


@pytest.mark.parametrize(
    "name", ["config.toml", "environment.json", "metrics.jsonl", "evaluation.json"]
)
def test_files_of_a_run(name: str, cli: Cli) -> None:
    enlarge(make_run(Path("run")) / name)
    refuse(cli("report", "run"), 3, name)
