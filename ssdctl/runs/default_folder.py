"""Choose the run folder: `--out`, or a name made of dataset, backbone and preset. Torch-free."""

from __future__ import annotations

import sys
from pathlib import Path

from ssdctl.config import Config
from ssdctl.config.sections.train import DEFAULT_PRESET
from ssdctl.data.store_folder import default_root
from ssdctl.files import read_limited
from ssdctl.runs.layout import RUNS, RunDir

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CONFIG_BYTES = 1 << 20


def run_dir(config: Config) -> RunDir:
    """Return the run folder of a config: `--out`, else `runs/DATASET-BACKBONE`.

    A preset other than the default is added to the name, so that runs of different datasets,
    networks and recipes do not collide. A run that an earlier version started in `runs/PRESET`
    continues there if it has the same dataset and backbone.
    """
    train = config.train
    if train.out:
        return RunDir(Path(train.out))
    preset = "" if train.preset == DEFAULT_PRESET else f"-{train.preset}"
    run = RunDir(RUNS / f"{_dataset_name(config)}-{config.model.backbone}{preset}")
    earlier = RunDir(RUNS / train.preset)
    return earlier if not run.is_started() and _is_run_of(earlier, config) else run


def _dataset_name(config: Config) -> str:
    """Return the name of the dataset's folder; `fake` if no image is read."""
    if config.train.fake_data:
        return "fake"
    root = _dataset_root(config)
    folder = root.parent if root.is_file() else root
    return folder.resolve().name if folder.name == ".." else folder.name or "data"


def _dataset_root(config: Config) -> Path:
    return Path(config.data.root or default_root()).absolute()


def _is_run_of(run: RunDir, config: Config) -> bool:
    """Return whether a folder has a run of this dataset and backbone that can be continued."""
    if not run.step_checkpoints():
        return False
    try:
        settings = tomllib.loads(read_limited(run.config, MAX_CONFIG_BYTES).decode())
        saved = settings["data"]["root"], settings["model"]["backbone"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    return saved == (str(_dataset_root(config)), config.model.backbone)
