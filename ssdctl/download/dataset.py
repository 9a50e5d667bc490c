"""Fetch a dataset's files and unpack them, for `ssdctl download`.

For each archive that was unpacked, `.ssdctl/NAME.json` in the dataset folder records its hash and
what it contained (path, size, CRC). So a second run detects what is done without the archive, and
`verify` can check every file; it marks the record of an archive with damaged files as broken.

An archive's names and sizes are checked before a byte is written. The content is written to a
temporary folder next to the record (`NAME.unpacking`), CRCs are checked while reading, and only
then are the top-level folders renamed to the destination. Hashes are pinned, but a manifest, and so
the archive that it pins, may be hostile.

A file of the same name with another content may be a label file that the user corrected: it is
kept as NAME.replaced. No other file is removed except the archives themselves.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

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
from ssdctl.download.transfer import Progress, partial_path, short_name
from ssdctl.errors import DiskError, IntegrityError, SsdctlError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_error,
    disk_errors,
    is_plain_name,
    link_or_copy,
    make_dir,
    msgspec_type,
    read_limited,
    safe_join,
    set_aside,
    write_bytes,
)
from ssdctl.runtime.safe_text import counted, redact_url

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 1 << 28  # the names of two million files
MAX_ENTRIES = 2_000_000
MAX_RATIO = 100  # content to archive; JSON takes 10, JPEG 1, a bomb 1000 and more
RECORDS_DIR = ".ssdctl"  # download's records in the dataset folder: no archive may write there
UNIX, UTF8_NAME = 3, 0x800  # the system that wrote an entry, the flag of its name's encoding
# What zipfile and zlib raise.
BROKEN_ZIP = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OverflowError, OSError,
    ValueError,  # a seek before the start, an impossible date, a name that is not UTF-8
    RuntimeError,  # an encrypted entry, an unknown method
)  # fmt: skip
# OSErrors that an archive causes, in a folder that was empty: an invalid seek, two entries of one
# name, a file that is also a folder, a name that is too long for a file system.
OF_ARCHIVE = (
    None, errno.EINVAL, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip


class Entry(NamedTuple):
    """A file: its path below the destination, its size in bytes, its CRC-32 if it is known."""

    path: str
    size: int
    crc: int | None


class Record(msgspec.Struct, frozen=True):
    """The content of an archive when it was unpacked."""

    name: str
    sha256: str
    entries: list[Entry]
    is_broken: bool = False  # `verify` found damaged files; the next download replaces them


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
    names = _manifest_names(files)
    for file in files:
        if file.unpack and (record := _read_record(dest, file)) is not None:
            _check_owners(record.entries, safe_join(dest, file.name), names)
        if (left := _temporary_dir(dest, file)).exists():  # of a killed run: it takes space
            with contextlib.suppress(DiskError), claim(_record_path(dest, file)):
                shutil.rmtree(left, ignore_errors=True)
    check_space(dest, needed_bytes(files, dest, keep_archives), "the download")
    make_dir(dest)
    get = partial(
        fetch,
        folder=dest,
        mirror=mirror,
        connections=connections,
        retry_policy=retry_policy,
        progress=progress,
    )
    results: list[dict[str, Any]] = []
    for file in files:
        result: dict[str, Any] = {"name": file.name, "bytes": file.bytes, "sha256": file.sha256}
        if file.unpack:
            record, state = _get_archive(file, files, dest, keep_archives, get, progress)
            results.append({**result, "state": state, "files": len(record.entries)})
        else:
            before = _modified_ns(safe_join(dest, file.name))
            path = get(file)
            is_present = _modified_ns(path) == before
            results.append({**result, "state": "present" if is_present else "fetched"})
    return results


def _modified_ns(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _get_archive(
    file: PinnedFile,
    files: Sequence[PinnedFile],
    dest: Path,
    keep_archives: bool,
    get: Callable[[PinnedFile], Path],
    progress: Progress,
) -> tuple[Record, str]:
    record_path = _record_path(dest, file)
    if not os.access(dest, os.W_OK) and (record := _whole_record(dest, file)) is not None:
        return record, "present"  # without a lock: the disk is read-only
    with claim(record_path):
        record, state = _whole_record(dest, file), "present"
        archive = safe_join(dest, file.name)
        if record is None:
            others = [f for f in files if f.unpack and f != file]
            owners = _manifest_names(files) | {
                entry.path: (other.name, entry)
                for other in others
                if (record := _read_record(dest, other)) is not None
                for entry in record.entries
            }
            temporary = _temporary_dir(dest, file)
            entries = unpack(get(file), dest, temporary, owners=owners, progress=progress)
            _report_left(record_path, entries)
            os.sync()  # 118,287 files: one call, before the record that lists them
            record, state = Record(file.name, file.sha256, entries), "fetched"
            _write_record(dest, file, record)
        # A run that died between unpacking and here left the archive.
        if not keep_archives and (state == "fetched" or is_whole(archive, file, progress)):
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

    def is_present(file: PinnedFile) -> bool:
        if file.unpack:
            return _whole_record(dest, file) is not None
        return has_size(safe_join(dest, file.name), file.bytes)

    return [
        {
            "name": file.name,
            "url": redact_url(file.urls(mirror)[0]),
            "bytes": file.bytes,
            "sha256": file.sha256,
            "unpack": file.unpack,
            "state": "present" if is_present(file) else "missing",
        }
        for file in files
    ]


def verify(
    files: Sequence[PinnedFile], dest: Path, progress: Progress = no_progress
) -> list[dict[str, Any]]:
    """Check the files in `dest` byte by byte, without network.

    The record of an archive whose content is broken says so: the next download gets it again.

    Returns:
        For each file: `name`, `state` (`intact`, `broken` or `missing`) and `problems`, the paths
        that are absent or differ.
    """
    results = []
    for file in files:
        target = safe_join(dest, file.name)
        record = _read_record(dest, file) if file.unpack else None
        if record is None:
            is_intact = not file.unpack and is_whole(target, file, progress)
            problems = [] if is_intact else [file.name]
        else:
            problems = _differing(dest, record, progress)
            if record.is_broken != bool(problems):
                with contextlib.suppress(DiskError):  # a read-only folder
                    changed = msgspec.structs.replace(record, is_broken=bool(problems))
                    _write_record(dest, file, changed)
        is_missing = record is None and (file.unpack or not target.is_file())
        state = "missing" if is_missing else "broken" if problems else "intact"
        results.append({"name": file.name, "state": state, "problems": problems})
    return results


def _record_path(dest: Path, file: PinnedFile) -> Path:
    path = safe_join(dest / RECORDS_DIR, file.name)
    return path.with_name(f"{short_name(path)}.json")


def _temporary_dir(dest: Path, file: PinnedFile) -> Path:
    return _record_path(dest, file).with_suffix(".unpacking")


def _write_record(dest: Path, file: PinnedFile, record: Record) -> None:
    write_bytes(_record_path(dest, file), msgspec.json.encode(record))


def _read_record(dest: Path, file: PinnedFile) -> Record | None:
    record = _read_record_file(_record_path(dest, file))
    return record if record is not None and record.sha256 == file.sha256 else None


def _read_record_file(path: Path) -> Record | None:
    try:
        content = read_limited(path, MAX_RECORD_BYTES)
        return msgspec.json.decode(content, type=msgspec_type(Record))
    except (OSError, *DECODE_ERRORS):
        return None


def _report_left(record_path: Path, entries: list[Entry]) -> None:
    """Log which files of an earlier version of an archive are not in the new one."""
    earlier = _read_record_file(record_path)
    if earlier and (left := {e.path for e in earlier.entries} - {e.path for e in entries}):
        log.warning(
            "%s: this version lacks %s of the earlier one, left in place, such as %s",
            earlier.name,
            counted(len(left), "file"),
            min(left),
        )


def _whole_record(dest: Path, file: PinnedFile) -> Record | None:
    """Return the record of an archive if each of its files exists with its size."""
    record = _read_record(dest, file)
    if record is None or record.is_broken:
        return None
    is_complete = all(has_size(safe_join(dest, e.path), e.size) for e in record.entries)
    return record if is_complete else None


def _differing(dest: Path, record: Record, progress: Progress) -> list[str]:
    """Return the paths of files whose size or CRC differs from the record."""
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


def unpack(
    archive: Path,
    dest: Path,
    temporary: Path,
    *,
    owners: Mapping[str, tuple[str, Entry | None]] = {},
    progress: Progress,
) -> list[Entry]:
    """Unpack `archive` into `dest`, by way of the folder `temporary`. The caller holds a lock.

    `owners` are the files that belong to others: path -> its archive, and what it is.
    Files with other contents than in the archive are set aside.

    Raises:
        IntegrityError: It is cut, broken, unsafe, too large for its size, or has another file of
            an owner's; nothing was published.
        DiskError: The content cannot be written.
    """
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = _checked_entries(opened, archive)
            entries = [_entry(info) for info in infos if not info.is_dir()]
            _check_owners(entries, archive, owners)
            num_bytes = sum(info.file_size for info in infos)
            check_space(dest, num_bytes, f"unpacking {archive.name}")
            with disk_errors(temporary, "creating"):
                temporary.mkdir(parents=True)
            _extract(opened, infos, temporary, partial(progress, f"unpacking {archive.name}"))
        present = [e for e in entries if safe_join(dest, e.path).is_file()]
        with disk_errors(dest, "writing"):
            _set_aside(dest, _differing(dest, Record(archive.name, "", present), progress))
            _publish(temporary, dest)
    except BROKEN_ZIP as error:
        raise _broken(archive, temporary, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return entries


def _set_aside(dest: Path, paths: Sequence[str]) -> None:
    for path in paths:
        set_aside(safe_join(dest, path))
    if paths:
        log.warning(
            "%s with other contents than those of the download: kept as NAME.replaced, such as %s",
            counted(len(paths), "file"),
            paths[0],
        )


def _manifest_names(files: Sequence[PinnedFile]) -> dict[str, tuple[str, Entry | None]]:
    return {f.name: ("the manifest", Entry(f.name, f.bytes or 0, None)) for f in files}


def _check_owners(
    entries: list[Entry], archive: Path, owners: Mapping[str, tuple[str, Entry | None]]
) -> None:
    for entry in entries:
        owner, other = owners.get(entry.path, ("", entry))
        is_same = other and other.size == entry.size and other.crc in (None, entry.crc)
        if not is_same:
            raise IntegrityError(
                f"{archive}: its {entry.path!r} would replace a file of {owner}",
                hint="leave that file or the archive out, or give each a manifest and a --dest",
            )


def _broken(archive: Path, temporary: Path, error: Exception) -> SsdctlError:
    reason = str(error) or type(error).__name__
    if isinstance(error, OSError):
        if error.errno not in OF_ARCHIVE:
            return disk_error(error, error.filename or archive, "unpacking")
        if error.filename:
            reason = f"{os.path.relpath(error.filename, temporary)!r:.60}: {error.strerror}"
    return IntegrityError(
        f"{archive}: cannot be unpacked: {reason}",
        hint="if you trust it, leave unpack out of its manifest and unpack it by hand",
    )


def _entry(info: zipfile.ZipInfo) -> Entry:
    return Entry(info.filename, info.file_size, info.CRC)


def _checked_entries(opened: zipfile.ZipFile, archive: Path) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive, named as they are to be written."""
    infos = []
    for info in opened.infolist():
        name = info.orig_filename  # zipfile's own is cut at a NUL
        if info.create_system == UNIX and not info.flag_bits & UTF8_NAME:
            with contextlib.suppress(UnicodeError):  # it is CP437, as zipfile takes it
                name = name.encode("cp437").decode()
        # Python 3.12 and later: another name in an extra field
        is_same = info.filename in (name, info.orig_filename)
        name = name.removeprefix("./")
        if name in ("", "/"):  # the destination itself
            continue
        parts = name.rstrip("/").split("/")
        if (
            not is_same
            or not is_plain_name(name)
            or any(part in ("", ".", "..") for part in parts)
            or parts[0] == RECORDS_DIR
        ):
            raise zipfile.BadZipFile(f"{name!r} is not a plain path")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise zipfile.BadZipFile(f"{name!r} is a link or a device")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise zipfile.BadZipFile(f"{name!r} is packed by method {info.compress_type}")
        info.filename = name
        if info.is_dir() and info.file_size:
            raise zipfile.BadZipFile(f"the folder {name!r} has content")
        infos.append(info)
    if len(infos) > MAX_ENTRIES:
        raise zipfile.BadZipFile(f"{len(infos):,} entries are too many")
    if all(info.is_dir() for info in infos):
        raise zipfile.BadZipFile("it contains no files")
    size, total = archive.stat().st_size, sum(info.file_size for info in infos)
    if sum(info.compress_size for info in infos) > size:
        raise zipfile.BadZipFile("its entries overlap or go beyond its end")
    if total > size * MAX_RATIO:
        raise zipfile.BadZipFile(f"{total:,} bytes from an archive of {size:,}: a zip bomb")
    return infos


def _extract(
    opened: zipfile.ZipFile,
    infos: list[zipfile.ZipInfo],
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Write the entries below `folder`; zipfile reads no more of one than it declared."""
    total, done = sum(info.file_size for info in infos), 0
    created: set[Path] = set()  # a hundred thousand files: no call of the file system for each
    for info in infos:
        target = folder / info.filename
        parent = target if info.is_dir() else target.parent
        if parent not in created:
            parent.mkdir(parents=True, exist_ok=True)
            created.add(parent)
        if info.is_dir():
            continue
        with opened.open(info) as stream, target.open("xb") as file:
            while data := stream.read(HASH_BYTES):
                done += file.write(data)
                progress(done, total)
            if file.tell() != info.file_size:
                raise zipfile.BadZipFile(f"{info.filename!r} has another size than it declares")


def _publish(source: Path, dest: Path) -> None:
    """Move the content of a folder into another one; a new folder by one rename."""
    for item in sorted(source.iterdir()):
        target = dest / item.name
        if item.is_dir() and target.is_dir():
            _publish(item, target)
            continue
        try:
            item.replace(target)
        except OSError as error:
            if error.errno != errno.EXDEV:  # `dest` may be a link to another disk
                raise
            if item.is_dir():
                target.mkdir()
                _publish(item, target)
            else:
                link_or_copy(item, target)
