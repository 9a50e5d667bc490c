"""What this machine has and lacks for ssdctl, each with its remedy. Nothing is changed."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ssdctl.config import Config
from ssdctl.data.dataset import dataset_folders, find_splits
from ssdctl.data.prepare import is_prepared
from ssdctl.errors import SsdctlError
from ssdctl.files import free_bytes

PACKAGES = ("torch", "torchvision", "numpy", "pyarrow", "pillow", "hotcoco", "pycocotools")
FILES_WANTED = 1024
COCO_BYTES = 45_000_000_000  # archives plus what they unpack to


class Check(NamedTuple):
    """One line: `state` is ok, warn or fail; `remedy` says what to do about it."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def examine(config: Config) -> list[Check]:
    """Look at this machine, without importing torch into this process."""
    root, folder = dataset_folders(config.data)
    return [
        Check("python", "ok", f"{platform.python_version()} ({sys.executable})"),
        *(_package(name) for name in PACKAGES),
        *_devices(),
        _cores(),
        _files(),
        _program("torchrun", importlib.util.find_spec("torch") is not None, "pip install torch"),
        _program("mpirun", shutil.which("mpirun") is not None, "needed for HPUs: Open MPI"),
        _dataset(root, folder),
        _space(root),
    ]


def _package(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "fail", "not installed", "pip install ssdctl")


def _devices() -> list[Check]:
    """Ask torch in a process of its own: a broken driver must not take the doctor down."""
    code = "import torch; print(torch.cuda.device_count())"
    try:
        answer = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
        count = int(answer.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return [Check("cuda", "fail", f"torch cannot be imported: {error}", "reinstall torch")]
    cuda = Check("cuda", "ok", f"{count} GPUs")
    if not count:
        cuda = Check("cuda", "warn", "no GPU", "not needed for --device cpu; see nvidia-smi")
    hpu = Check("hpu", "ok", "bridge found")
    if importlib.util.find_spec("habana_frameworks") is None:
        hpu = Check("hpu", "warn", "no bridge", "for Gaudi: run in the vendor's PyTorch image")
    return [cuda, hpu]


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0))
    return Check("cores", "ok", f"{usable} usable of {os.cpu_count()}")


def _files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_WANTED:
        return Check("open files", "warn", f"limit {soft}", f"ulimit -n {FILES_WANTED}")
    return Check("open files", "ok", f"limit {soft}")


def _program(name: str, is_there: bool, remedy: str) -> Check:
    return Check(name, "ok", "found") if is_there else Check(name, "warn", "not found", remedy)


def _dataset(root: Path, folder: Path) -> Check:
    try:
        splits = find_splits(root)
        if is_prepared(root, folder):
            return Check("dataset", "ok", f"{root}: {', '.join(splits)}, prepared in {folder}")
    except SsdctlError as error:
        return Check("dataset", "warn", str(error), error.hint or "")
    remedy = f"ssdctl prepare --data {root}"
    return Check("dataset", "warn", f"{root}: {', '.join(splits)}, not prepared", remedy)


def _space(root: Path) -> Check:
    free = free_bytes(root.absolute())
    detail = f"{free / 1e9:.0f} GB free at {root}"
    if free < COCO_BYTES:
        remedy = f"COCO 2017 needs {COCO_BYTES / 1e9:.0f} GB to download and unpack"
        return Check("disk", "warn", detail, remedy)
    return Check("disk", "ok", detail)
