"""Fault 52: a dataset folder that cannot be written gets its index in a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ssdctl
from ssdctl.data.store_folder import default_store

OTHER_USERS = (65534, 65533)  # if the tests run as root, which mode bits do not stop


@pytest.fixture
def read_only(shapes: Path) -> Iterator[Path]:
    """A copy of the dataset that no other user can write, in a folder that all can enter."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        root = base / "dataset"
        shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
        for path in (root, *root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield root
        for path in (root, *root.rglob("*")):
            path.chmod(0o755)


def start(user: int, cache: Path, *args: object) -> subprocess.Popen[str]:
    """Start ssdctl as another user if this one is root."""
    code = "from ssdctl.__main__ import run; run()"
    env = os.environ | {
        "XDG_CACHE_HOME": str(cache),
        "HOME": str(cache),
        "PYTHONPATH": str(Path(ssdctl.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    more: dict[str, Any] = {}
    if os.getuid() == 0:
        more = {"user": user, "group": user, "extra_groups": []}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=env, cwd="/", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


@pytest.fixture
def caches(read_only: Path) -> list[Path]:
    """A cache folder of each user."""
    caches = []
    for user in OTHER_USERS:
        cache = read_only.parent / f"cache-{user}"
        cache.mkdir()
        if os.getuid() == 0:
            os.chown(cache, user, user)
            probe = start(user, cache, "--version")
            if probe.wait() != 0:
                pytest.skip(f"another user cannot run this Python: {probe.communicate()[1][-300:]}")
        caches.append(cache)
    return caches


def test_many_users_and_processes_at_once(read_only: Path, caches: list[Path]) -> None:
    before = sorted(path for path in read_only.rglob("*"))
    commands = [
        (cache, start(user, cache, "prepare", "--data", read_only, "--json"))
        for user, cache in zip(OTHER_USERS, caches, strict=True)
        for _ in range(3)
    ]
    for cache, process in commands:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        outcome = json.loads(out)
        store = Path(outcome["store"])
        assert cache in store.parents
        assert not outcome["packed"]  # a home folder is no place for all the images
        assert str(store) in err
        assert (store / "index-train.arrow").is_file()
    for user, cache in zip(OTHER_USERS, caches, strict=True):
        again = start(user, cache, "prepare", "--data", read_only, "--json")
        assert json.loads(again.communicate(timeout=120)[0])["unchanged"]
    assert sorted(path for path in read_only.rglob("*")) == before


def test_an_option_still_decides(read_only: Path, caches: list[Path]) -> None:
    process = start(
        OTHER_USERS[0], caches[0],
        "prepare", "--data", read_only, "--store", caches[0] / "mine", "--json",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    outcome = json.loads(out)
    assert Path(outcome["store"]) == caches[0] / "mine"
    assert outcome["packed"]


def test_a_store_that_its_owner_prepared_is_used(read_only: Path, caches: list[Path]) -> None:
    read_only.chmod(0o755)
    owner = subprocess.run(
        [sys.executable, "-m", "ssdctl", "prepare", "--data", read_only, "--no-pack"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert owner.returncode == 0, owner.stderr
    for path in (read_only, read_only / "prepared"):
        path.chmod(0o555)
    process = start(
        OTHER_USERS[0], caches[0], "prepare", "--data", read_only, "--no-pack", "--json"
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    outcome = json.loads(out)
    assert Path(outcome["store"]) == read_only / "prepared"
    assert outcome["unchanged"]


def test_a_writable_dataset_keeps_its_store(tmp_path: Path) -> None:
    assert default_store(tmp_path) == tmp_path / "prepared"
    assert default_store(tmp_path / "missing") == tmp_path / "missing/prepared"
