"""Check the dataset, its store, disk space and backbone weights, and the hosts they come from."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from ssdctl.config import Config
from ssdctl.data import TOML
from ssdctl.data.annotations import SPLITS
from ssdctl.data.dataset import find
from ssdctl.data.index import Made, Metadata, again_command, index_path, read_made, read_metadata
from ssdctl.data.sources import changes
from ssdctl.data.store import image_folder
from ssdctl.data.store_folder import dataset_folders
from ssdctl.doctor import ABSENT, OK, Check, Doctor, result
from ssdctl.download.fetch import torch_cache_dir
from ssdctl.download.http import RESUME, NotFound, RetryPolicy, length_of
from ssdctl.download.pinned_files import COCO2017, PinnedFile
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.files import free_bytes
from ssdctl.model.pretrained import find_weights, weights_named
from ssdctl.runtime.system import run_in_daemon_thread

COCO_BYTES = sum((f.bytes or 0) + (f.unpacked_bytes or 0) for f in COCO2017.values())
SPARE_BYTES = 5_000_000_000  # for checkpoints and reports, if the dataset is complete
RETRY_POLICY = RetryPolicy(connect_s=8, read_s=8, stall_s=15, retries=0, connect_retries=0)
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
REMEDY = "set HTTPS_PROXY and HTTP_PROXY, or fetch from elsewhere with --mirror URL"


def check_data(doctor: Doctor) -> Iterator[Check]:
    """Yield the results for the dataset, the store, the disk and the weights of a config."""
    config = doctor.config
    root, folder = dataset_folders(config.data)
    made = read_made(folder)
    metadata = [m for s in (made.splits if made else ()) if (m := read_metadata(folder, s))]
    changed = changes(root, folder, made) if made else []
    dataset = _dataset(root, made, metadata, is_changed=bool(changed))
    if config.data.root is None and not root.exists():
        remedy = "give --data DIR; `ssdctl download` fetches COCO"
        dataset = Check("dataset", ABSENT, f"none given, and no {root}", remedy)
    yield dataset
    store = _store(root, folder, made, metadata, changed) if dataset.state == OK else None
    if store is not None:
        yield store
    yield _space(Path() if dataset.state == ABSENT else root, folder, store)
    yield _weights(config)


def nearest_folder(path: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _dataset(root: Path, made: Made | None, metadata: list[Metadata], *, is_changed: bool) -> Check:
    if made is None or is_changed or not root.exists():
        try:
            detail = f"{root}: {find(root)[0]}"
        except SsdctlError as error:
            is_broken = (root / TOML).is_file()  # else there is no dataset yet
            return result("dataset", str(error), error.hint or "", is_wanted=is_broken)
        if made is None:
            return result("dataset", detail)
    detail = f"{root}: {' and '.join(made.splits) if made else ''}"
    missing = [m for m in metadata if not image_folder(root, m).is_dir()]
    if missing:
        folders = ", ".join(str(image_folder(root, m)) for m in missing)
        detail += f"; no image folder {folders}: only a packed store works"
    is_lost = not all(m.packed for m in missing)
    return result("dataset", detail, "put it back" if is_lost else None, is_wanted=is_lost)


def _store(
    root: Path, folder: Path, made: Made | None, metadata: list[Metadata], changed: list[str]
) -> Check:
    again = again_command(root, folder)
    if made is None:
        has_index = any(index_path(folder, split).is_file() for split in SPLITS)
        state = "incomplete, unreadable, or of another version" if has_index else "not prepared"
        return result("store", f"{folder}: {state}", again)
    if not all((folder / shard.file).is_file() for m in metadata for shard in m.shards):
        return result("store", f"{folder}: incomplete (a shard is missing)", again)
    if changed:
        return result("store", f"{folder}: stale ({'; '.join(changed)})", again)
    packed = ", packed" if any(m.packed for m in metadata) else ""
    return result("store", f"{folder}: prepared{packed}")


def _space(root: Path, folder: Path, store: Check | None) -> Check:
    """Check the free space; `store` is the result for the store, None without a dataset."""
    where = nearest_folder(root if store is None else folder)  # to download to, or to pack in
    free = free_bytes(where)
    detail = f"{free / 1e9:,.0f} GB free at {where}"
    is_prepared = store is not None and store.state == OK
    if not is_prepared and not os.access(where, os.W_OK):
        return result("disk", f"{detail}; you may not write there", "give --store DIR elsewhere")
    if store is not None and free < SPARE_BYTES:
        return result("disk", detail, "a packed store takes as much as its images")
    if store is None and free < COCO_BYTES:
        remedy = f"COCO 2017 needs {COCO_BYTES / 1e9:.0f} GB with its archives"
        return result("disk", detail, remedy)
    return result("disk", detail)


def _weights(config: Config) -> Check:
    name = config.model.weights_name
    if config.train.init is not None or name is None:
        return result("weights", "not needed: the config trains without them")
    if Path(name).is_file():
        return result("weights", f"{name}, {Path(name).stat().st_size:,} bytes")
    try:
        file = weights_named(name).file
        path = find_weights(name)
    except SsdctlError as error:
        return result("weights", str(error), error.hint or "", is_wanted=True)
    cached = torch_cache_dir() / file.name
    if path is not None:
        return result("weights", f"{path}, {path.stat().st_size:,} bytes, SHA-256 verified")
    remedy = f"ssdctl fetch-weights {name}"
    if cached.is_file():
        detail = f"{cached}: its size or SHA-256 differs from the published file"
        return result("weights", detail, f"{remedy} replaces it")
    if not os.access(nearest_folder(cached.parent), os.W_OK):
        remedy += ", with TORCH_HOME set to a folder that can be written"
        return result("weights", f"{name}: not in {cached.parent}", remedy)
    detail = f"{name}: not in {cached.parent} yet; the first training downloads it"
    return Check("weights", ABSENT, detail, remedy)


def check_network(doctor: Doctor) -> Iterator[Check]:
    """Request one byte of each file, as `download` and `fetch-weights` do, in parallel."""
    config = doctor.config
    files = dict(COCO2017)
    name = config.model.weights_name
    if name is not None:
        with contextlib.suppress(UsageError):  # a file of the user: checked by `check_data`
            files["weights"] = weights_named(name).file
    answers = [
        run_in_daemon_thread(partial(_check_file, part, file, config.download.mirror))
        for part, file in files.items()
    ]
    names = (*PROXIES, *CERTIFICATES)  # that requests reads
    values = {name: os.environ.get(name.lower()) or os.environ.get(name) for name in names}
    user = re.compile("^([^:/]+://)?.*@")  # and password; the address may have no scheme
    shown = [f"{name}=" + user.sub(r"\1***@", value) for name, value in values.items() if value]
    yield result("proxies", ", ".join(shown) or "none set")
    for answer in answers:
        yield answer.result()


def _check_file(part: str, file: PinnedFile, mirror: str | None) -> Check:
    start = time.perf_counter()
    urls = file.urls(mirror)
    try:
        for url in urls:
            try:
                num_bytes = length_of(url, RETRY_POLICY)
                break
            except NotFound:
                if url == urls[-1]:
                    raise
    except SsdctlError as error:
        hint = REMEDY if error.hint in (None, RESUME) else error.hint  # it keeps no bytes
        return result(part, str(error), hint, is_wanted=True)
    host = urlsplit(url).netloc.rpartition("@")[2]
    if file.bytes is not None and num_bytes != file.bytes:
        detail = f"{file.name}: {host} has {num_bytes:,} bytes, expected are {file.bytes:,}"
        remedy = "the host serves a different file: try --mirror"
        return result(part, detail, remedy, is_wanted=True)
    spent = f"answered in {time.perf_counter() - start:.2f} s"
    return result(part, f"{file.name}: {host} has its {num_bytes:,} bytes, {spent}")
