"""Check the dataset, its store, disk space and backbone weights. Read-only."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ssdctl.config import Config
from ssdctl.data import store
from ssdctl.data.dataset import TOML, SplitFiles, find_splits
from ssdctl.data.store_folder import dataset_folders
from ssdctl.doctor.check import ABSENT, FAIL, OK, WARN, CheckResult
from ssdctl.download.fetch import torch_cache_dir
from ssdctl.download.sources import COCO2017
from ssdctl.errors import SsdctlError
from ssdctl.files import free_bytes
from ssdctl.model.pretrained import find_weights, weights_named, weights_of

COCO_BYTES = sum((f.bytes or 0) + (f.unpacked_bytes or 0) for f in COCO2017.values())
SPARE_BYTES = 5_000_000_000  # for checkpoints and reports, if the dataset is complete


def check_data(config: Config) -> list[CheckResult]:
    """Return the results for the dataset, the store, the disk and the weights of a config."""
    root, folder = dataset_folders(config.data)
    dataset = _dataset(root, folder)
    if config.data.root is None and not root.exists():
        dataset = CheckResult("dataset", ABSENT, *_no_dataset(root))
    results = [dataset]
    if dataset.state == OK:
        results.append(_store(root, folder))
    is_ready = len(results) > 1 and results[-1].state == OK
    return [*results, _space(root, folder, dataset.state == OK, is_ready), _weights(config)]


def _no_dataset(root: Path) -> tuple[str, str]:
    return f"none given, and no {root}", "give --data DIR; `ssdctl download` fetches COCO"


def nearest_folder(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _dataset(root: Path, folder: Path) -> CheckResult:
    try:
        splits = find_splits(root, folder)
    except SsdctlError as error:
        is_broken = (root / TOML).is_file()  # else there is no dataset yet
        return CheckResult("dataset", FAIL if is_broken else WARN, str(error), error.hint or "")
    missing = [str(files.images) for files in splits.values() if not files.images.is_dir()]
    detail = f"{root}: {' and '.join(splits)}"
    if missing:
        detail += f"; no image folder {', '.join(missing)}: only a packed store works"
    return CheckResult("dataset", OK, detail)


def _store(root: Path, folder: Path) -> CheckResult:
    again = f"ssdctl prepare --data {shlex.quote(str(root))}"
    again += "" if folder == root / "prepared" else f" --store {shlex.quote(str(folder))}"
    states = {
        split: _state(folder, split, files) for split, files in find_splits(root, folder).items()
    }
    wrong = [f"{split} {state}" for split, state in states.items() if state != "prepared"]
    if not wrong:
        packed = [m for s in states if (m := store.read_metadata(folder, s)) and m.packed]
        return CheckResult("store", OK, f"{folder}: prepared{', packed' if packed else ''}")
    return CheckResult("store", WARN, f"{folder}: {', '.join(wrong)}", again)


def _state(folder: Path, split: str, files: SplitFiles) -> str:
    """Return the state of a split's store in a few words: `prepared` if it can be used."""
    metadata = store.read_metadata(folder, split)
    if metadata is None:
        has_index = store.index_path(folder, split).is_file()
        return "unreadable, or of another version" if has_index else "not prepared"
    if not store.is_same(metadata.fingerprint, files.annotations):
        return "stale (its annotations changed since)"
    if not all((folder / shard.file).is_file() for shard in metadata.shards):
        return "incomplete (a shard is missing)"
    return "prepared"


def _space(root: Path, folder: Path, has_dataset: bool, is_prepared: bool) -> CheckResult:
    free = free_bytes(root.absolute())
    detail = f"{free / 1e9:,.0f} GB free at {root}"
    where = nearest_folder(folder)
    if not is_prepared and not os.access(where, os.W_OK):
        return CheckResult(
            "disk", WARN, f"{detail}; {where} is read-only", "give --store DIR elsewhere"
        )
    if has_dataset:
        if free < SPARE_BYTES:
            return CheckResult("disk", WARN, detail, "a packed store takes as much as its images")
    elif free < COCO_BYTES:
        remedy = f"COCO 2017 needs {COCO_BYTES / 1e9:.0f} GB to download and unpack"
        return CheckResult("disk", WARN, detail, remedy)
    return CheckResult("disk", OK, detail)


def _weights(config: Config) -> CheckResult:
    name = weights_of(config.model)
    if config.train.init is not None or name is None:
        return CheckResult("weights", OK, "not needed: the config trains without them")
    if Path(name).is_file():
        return CheckResult("weights", OK, f"{name}, {Path(name).stat().st_size:,} bytes")
    try:
        file = weights_named(name).file
        path = find_weights(name)
    except SsdctlError as error:
        return CheckResult("weights", FAIL, str(error), error.hint or "")
    cached = torch_cache_dir() / file.name
    if path is not None:
        return CheckResult(
            "weights", OK, f"{path}, {path.stat().st_size:,} bytes, SHA-256 verified"
        )
    remedy = f"ssdctl fetch-weights {name}"
    if cached.is_file():
        detail = f"{cached}: its size or SHA-256 is not that of the published file"
        return CheckResult("weights", WARN, detail, f"{remedy} replaces it")
    if not os.access(nearest_folder(cached.parent), os.W_OK):
        remedy += ", with TORCH_HOME set to a folder that can be written"
        return CheckResult("weights", WARN, f"{name}: not in {cached.parent}", remedy)
    detail = f"{name}: not in {cached.parent} yet; the first training downloads it"
    return CheckResult("weights", ABSENT, detail, remedy)
