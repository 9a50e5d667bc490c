"""Fault 52: a dataset folder that cannot be written gets its index in a cache folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssdctl.config import DataConfig, PrepareConfig
from ssdctl.data.prepare import prepare
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import UsageError

# Root is stopped by mode bits only without these capabilities.
AS_ORDINARY_USER = (
    ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]
    if os.getuid() == 0
    else []
)


@pytest.fixture
def read_only(shapes: Path, tmp_path: Path) -> Iterator[Path]:
    if AS_ORDINARY_USER and shutil.which(AS_ORDINARY_USER[0]) is None:
        pytest.skip("setpriv takes root's capabilities away, and is not here")
    root = tmp_path / "dataset"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    for path in (root, *root.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield root
    for path in (root, *root.rglob("*")):
        path.chmod(0o755)


def start(cache: Path, *args: object) -> subprocess.Popen[str]:
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen(
        [*AS_ORDINARY_USER, sys.executable, "-m", "ssdctl", *map(str, args)],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out), err


def test_an_option_decides_else_a_store_that_its_owner_prepared(
    read_only: Path, tmp_path: Path
) -> None:
    read_only.chmod(0o755)
    prepare(read_only, read_only / "prepared", PrepareConfig(pack=False))
    for path in (read_only, read_only / "prepared"):
        path.chmod(0o555)
    command = ("prepare", "--data", read_only, "--json")
    for options, store in (
        (("--no-pack",), read_only / "prepared"),
        (("--store", tmp_path / "mine"), tmp_path / "mine"),
    ):
        outcome, _ = finish(start(tmp_path / "cache", *command, *options))
        assert outcome["store"] == str(store)
        assert outcome["unchanged"] == (not outcome["packed"]) == ("--no-pack" in options)


@pytest.mark.parametrize(
    "url", ["s3://bucket/data", "https://bob:hunter2@host/data?sig=x", "gs://b"]
)
def test_urls_are_refused_with_a_way_that_works(url: str) -> None:
    for config in (DataConfig(root=url), DataConfig(root="here", store=url)):
        with pytest.raises(UsageError) as error:
            dataset_folders(config)
        option = "--store" if config.store else "--data"
        assert option in str(error.value)
        assert url.partition("?")[0].replace("bob:hunter2", "***") in str(error.value)
        assert "hunter2" not in str(error.value)
        assert "mount" in (error.value.hint or "")
    assert dataset_folders(DataConfig(root="a:b/c"))[0] == Path("a:b/c")
