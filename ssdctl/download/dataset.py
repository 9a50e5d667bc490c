"""Fetch a dataset's files and unpack them, for `ssdctl download`.

For each archive that was unpacked, `.ssdctl/NAME.json` in the dataset folder records its hash and
what it contained (path, size, CRC). So a second run detects what is done without the archive, and
`verify` can check every file.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ssdctl.download.archive import RECORDS_DIR, Entry, unpack
from ssdctl.download.fetch import (
    DEFAULT_POLICY,
    HASH_BYTES,
    check_space,
    claim,
    fetch,
    has_size,
    is_whole,
    missing_bytes,
    no_progress,
)
from ssdctl.download.http import RetryPolicy
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.download.transfer import Progress, partial_path
from ssdctl.files import DECODE_ERRORS, make_dir, read_limited, safe_join, write_bytes
from ssdctl.runtime.safe_text import redact_url

MAX_RECORD_BYTES = 1 << 28  # the names of two million files


class Record(msgspec.Struct, frozen=True):
    """The content of an archive when it was unpacked."""

    name: str
    sha256: str
    entries: list[Entry]


def download(
    files: Sequence[PinnedFile],
    dest: Path,
    *,
    mirror: str | None = None,
    connections: int = 8,
    keep_archives: bool = False,
    retry_policy: RetryPolicy = DEFAULT_POLICY,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:
    """Fetch `files` into `dest`, unpack the archives there, remove them.

    What is there already is not fetched again. After an interruption, the next call continues.

    Returns:
        For each file: `name`, `bytes`, `sha256`, `state` (`fetched` or `present`), and for
        archives `files`, the number unpacked.
    """
    for file in files:
        file.urls(mirror)  # a mirror that is no URL is seen before anything is made
    check_space(dest, needed_bytes(files, dest, keep_archives), "the download")
    make_dir(dest)

    def get(file: PinnedFile) -> Path:
        return fetch(
            file,
            dest,
            mirror=mirror,
            connections=connections,
            retry_policy=retry_policy,
            progress=progress,
        )

    results: list[dict[str, Any]] = []
    for file in files:
        result: dict[str, Any] = {"name": file.name, "bytes": file.bytes, "sha256": file.sha256}
        if file.unpack:
            record, state = _get_archive(file, dest, keep_archives, get, progress)
            results.append({**result, "state": state, "files": len(record.entries)})
        else:
            before = _modified_ns(safe_join(dest, file.name))
            is_present = _modified_ns(get(file)) == before
            results.append({**result, "state": "present" if is_present else "fetched"})
    return results


def _modified_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _get_archive(
    file: PinnedFile,
    dest: Path,
    keep_archives: bool,
    get: Callable[[PinnedFile], Path],
    progress: Progress,
) -> tuple[Record, str]:
    """Fetch and unpack one archive unless its content is complete; return its record and state."""
    record_path = _record_path(dest, file)
    if not os.access(dest, os.W_OK) and (record := _whole_record(dest, file)) is not None:
        return record, "present"  # without a lock: the disk is read-only
    with claim(record_path):
        record, state = _whole_record(dest, file), "present"
        if record is None:
            entries = unpack(get(file), dest, num_files=file.num_files, progress=progress)
            os.sync()  # 118,287 files: one call, before the record that lists them
            record, state = Record(file.name, file.sha256, entries), "fetched"
            write_bytes(record_path, msgspec.json.encode(record))
        if not keep_archives:  # also what a run left that died between unpacking and here
            archive = safe_join(dest, file.name)
            archive.unlink(missing_ok=True)
            partial_path(archive).unlink(missing_ok=True)
    return record, state


def needed_bytes(files: Sequence[PinnedFile], dest: Path, keep_archives: bool) -> int:
    """Return how many more bytes the download needs at most, archives and content.

    The content of an archive of unknown size is assumed to be as large as the archive.
    """
    kept = most = 0
    for file in files:
        target, num_bytes = safe_join(dest, file.name), file.bytes or 0
        if file.unpack and _whole_record(dest, file) is not None:
            continue
        archive = 0 if has_size(target, num_bytes) else missing_bytes(target, num_bytes)
        content = (file.unpacked_bytes or num_bytes) if file.unpack else 0
        most = max(most, kept + archive + content)
        kept += content + (archive if keep_archives or not file.unpack else 0)
    return most


def list_files(files: Sequence[PinnedFile], dest: Path, mirror: str | None) -> list[dict[str, Any]]:
    """Return each file's facts and whether it is `present` or `missing`, without network."""
    rows = []
    for file in files:
        if file.unpack:
            is_present = _whole_record(dest, file) is not None
        else:
            is_present = has_size(safe_join(dest, file.name), file.bytes)
        row = {
            "name": file.name,
            "url": redact_url(file.urls(mirror)[0]),
            "bytes": file.bytes,
            "sha256": file.sha256,
            "unpack": file.unpack,
            "state": "present" if is_present else "missing",
        }
        rows.append(row)
    return rows


def verify(
    files: Sequence[PinnedFile], dest: Path, progress: Progress = no_progress
) -> list[dict[str, Any]]:
    """Check the files in `dest` byte by byte, without network.

    The record of an archive whose content is broken is dropped: the next download gets it again.

    Returns:
        For each file: `name`, `state` (`intact`, `broken` or `missing`) and `problems`, the paths
        that are absent or differ.
    """
    results = []
    for file in files:
        target = safe_join(dest, file.name)
        record = _read_record(dest, file) if file.unpack else None
        if record is None:
            problems = [] if is_whole(target, file, progress) else [file.name]
        elif problems := _differing(dest, record, progress):
            with contextlib.suppress(OSError):  # a read-only folder
                _record_path(dest, file).unlink()
        is_missing = record is None and not target.is_file()
        state = "missing" if is_missing else "broken" if problems else "intact"
        results.append({"name": file.name, "state": state, "problems": problems})
    return results


def _record_path(dest: Path, file: PinnedFile) -> Path:
    return safe_join(dest / RECORDS_DIR, file.name + ".json")


def _read_record(dest: Path, file: PinnedFile) -> Record | None:
    """Return the record of an archive that was unpacked here, if it is the pinned one."""
    try:
        content = read_limited(_record_path(dest, file), MAX_RECORD_BYTES)
        record = msgspec.json.decode(content, type=Record)
    except (OSError, *DECODE_ERRORS):
        return None
    return record if record.sha256 == file.sha256 else None


def _whole_record(dest: Path, file: PinnedFile) -> Record | None:
    """Return the same, if each of its files exists with its size; no file is read."""
    record = _read_record(dest, file)
    if record is None or not all(has_size(safe_join(dest, e.path), e.size) for e in record.entries):
        return None
    return record


def _differing(dest: Path, record: Record, progress: Progress) -> list[str]:
    """Return the paths of files whose size or CRC is not the recorded one."""
    total, done, differing = sum(entry.size for entry in record.entries), 0, []
    for path, size, expected in record.entries:
        crc, target = 0, safe_join(dest, path)
        with contextlib.suppress(OSError), target.open("rb") as stream:
            while data := stream.read(HASH_BYTES):
                crc = zlib.crc32(data, crc)
        if crc != expected or not has_size(target, size):
            differing.append(path)
        done += size
        progress(f"checking what {record.name} held", done, total)
    return differing
