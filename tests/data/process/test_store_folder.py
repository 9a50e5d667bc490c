"""Fault 52: a dataset folder that cannot be written gets its index in a cache folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_an_option_decides_else_a_store_of_the_owner(dataset: Path, tmp_path: Path) -> None:
    if AS_ORDINARY_USER and shutil.which(AS_ORDINARY_USER[0]) is None:
        pytest.skip("setpriv takes root's capabilities away, and is not here")
    prepare(dataset, dataset / "prepared", PrepareConfig(pack=False))
    for path in (dataset, dataset / "prepared"):
        path.chmod(0o555)
    command = [*AS_ORDINARY_USER, sys.executable, "-m", "ssdctl", "prepare", "--json"]
    command += ["--data", str(dataset)]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    for option, store in (
        (["--no-pack"], dataset / "prepared"),
        (["--store", str(tmp_path / "mine")], tmp_path / "mine"),
    ):
        done = subprocess.run([*command, *option], env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        outcome = json.loads(done.stdout)
        assert outcome["store"] == str(store)
        assert outcome["unchanged"] == (not outcome["packed"]) == ("--no-pack" in option)
    for path in (dataset, dataset / "prepared"):
        path.chmod(0o755)


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
