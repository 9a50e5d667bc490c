"""Dataset, store, space and backbone weights, as the config names them. Nothing is written."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ssdctl.config import Config
from ssdctl.data import store
from ssdctl.data.dataset import TOML, SplitFiles, dataset_folders, find_splits
from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult
from ssdctl.download.backbone_weights import cache_dir, find_weights, weights_of
from ssdctl.download.sources import COCO2017, weights_named
from ssdctl.errors import SsdctlError
from ssdctl.files import free_bytes

COCO_BYTES = sum((f.bytes or 0) + (f.unpacked_bytes or 0) for f in COCO2017.values())
SPARE_BYTES = 5_000_000_000  # for checkpoints and reports, if the dataset is complete


def check_data(config: Config) -> list[CheckResult]:
    """Look into the folders."""
    root, folder = dataset_folders(config.data)
    dataset = _dataset(root, folder)
    found = [dataset]
    if dataset.state == OK:
        found.append(_store(root, folder))
    is_ready = len(found) > 1 and found[-1].state == OK
    return [*found, _space(root, folder, dataset.state == OK, is_ready), _weights(config)]


def nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _dataset(root: Path, folder: Path) -> CheckResult:
    try:
        splits = find_splits(root, folder)
    except SsdctlError as error:
        is_meant = (root / TOML).is_file()  # somebody described a dataset, and it is broken
        return CheckResult("dataset", FAIL if is_meant else WARN, str(error), error.hint or "")
    lacking = [str(files.images) for files in splits.values() if not files.images.is_dir()]
    detail = f"{root}: {' and '.join(splits)}"
    if lacking:
        detail += f"; no image folder {', '.join(lacking)}: a packed store must do"
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
    """How far the store of a split is to be trusted, in a word or two."""
    known = store.read_metadata(folder, split)
    if known is None:
        is_there = store.index_path(folder, split).is_file()
        return "unreadable, or of another version" if is_there else "not prepared"
    if not store.is_same(known.fingerprint, files.annotations):
        return "stale (its annotations changed since)"
    if not all((folder / shard.file).is_file() for shard in known.shards):
        return "incomplete (a shard is gone)"
    return "prepared"


def _space(root: Path, folder: Path, is_there: bool, is_prepared: bool) -> CheckResult:
    free = free_bytes(root.absolute())
    detail = f"{free / 1e9:,.0f} GB free at {root}"
    where = nearest_folder(folder)
    if not is_prepared and not os.access(where, os.W_OK):
        return CheckResult(
            "disk", WARN, f"{detail}; {where} is read-only", "give --store DIR elsewhere"
        )
    if is_there:
        if free < SPARE_BYTES:
            return CheckResult("disk", WARN, detail, "a packed store takes as much as its images")
    elif free < COCO_BYTES:
        remedy = f"COCO 2017 needs {COCO_BYTES / 1e9:.0f} GB to download and unpack"
        return CheckResult("disk", WARN, detail, remedy)
    return CheckResult("disk", OK, detail)


def _weights(config: Config) -> CheckResult:
    name = weights_of(config.model)
    if config.train.init is not None or name is None:
        return CheckResult("weights", OK, "none are fetched: the config trains without")
    if Path(name).is_file():
        return CheckResult("weights", OK, f"{name}, {Path(name).stat().st_size:,} bytes")
    try:
        file = weights_named(name).file
        path = find_weights(name)
    except SsdctlError as error:
        return CheckResult("weights", FAIL, str(error), error.hint or "")
    there = cache_dir() / file.name
    if path is not None:
        return CheckResult(
            "weights", OK, f"{path}, {path.stat().st_size:,} bytes, SHA-256 verified"
        )
    remedy = f"ssdctl fetch-weights {name}"
    if there.is_file():
        detail = f"{there} is not what was published (size or SHA-256)"
        return CheckResult("weights", WARN, detail, f"{remedy} replaces it")
    if not os.access(nearest_folder(there.parent), os.W_OK):
        remedy += ", with TORCH_HOME set to a folder that can be written"
    return CheckResult("weights", WARN, f"{name}: not in {there.parent}", remedy)
