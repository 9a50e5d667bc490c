"""Extract an untrusted zip safely, atomically and with size limits.

Names and sizes are checked before a byte is written. The content is written to a temporary folder
next to its destination (`.NAME.unpacking`), CRCs are checked while reading, and only then are the
top-level folders renamed to the destination. Hashes are pinned, but a manifest, and so the archive
that it pins, may be hostile.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from ssdctl.download.fetch import check_space
from ssdctl.download.transfer import Progress
from ssdctl.errors import IntegrityError
from ssdctl.files import disk_error, disk_errors, is_plain_name, link_or_copy

CHUNK_BYTES = 1024 * 1024
MAX_ENTRIES = 2_000_000
MAX_RATIO = 100  # content to archive; JSON takes 10, JPEG 1, a bomb 1000 and more
RECORDS_DIR = ".ssdctl"  # download's records in the dataset folder: no archive may write there
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
    """One unpacked file: its path below the destination, its size in bytes, its CRC-32."""

    path: str
    size: int
    crc: int


def unpack(
    archive: Path, dest: Path, *, num_files: int | None = None, progress: Progress
) -> list[Entry]:
    """Unpack `archive` into `dest`, replacing files of the same names. The caller holds a lock.

    Raises:
        IntegrityError: It is cut, broken, unsafe, too large for its size, or has another number of
            files than `num_files`; nothing was published.
        DiskError: The content cannot be written.
    """
    temporary = dest / f".{archive.name}.unpacking"
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed run
    try:
        with zipfile.ZipFile(archive) as opened:
            infos = _checked_entries(opened, archive, num_files)
            num_bytes = sum(info.file_size for info in infos)
            check_space(dest, num_bytes, f"unpacking {archive.name}")
            with disk_errors(temporary, "creating"):
                temporary.mkdir(parents=True)
            _extract(opened, infos, temporary, f"unpacking {archive.name}", progress)
        with disk_errors(dest, "writing"):
            _publish(temporary, dest)
    except BROKEN_ZIP as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename:
            reason = f"{os.path.relpath(error.filename, temporary)!r:.60}: {error.strerror}"
        if isinstance(error, OSError) and error.errno not in OF_ARCHIVE:
            raise disk_error(error, error.filename or archive, "unpacking") from error
        raise IntegrityError(
            f"{archive}: broken archive: {reason}",
            hint="only zip archives are unpacked: delete it and fetch it again, or leave unpack "
            "out of its manifest",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [Entry(i.filename, i.file_size, i.CRC) for i in infos if not i.is_dir()]


def _checked_entries(
    opened: zipfile.ZipFile, archive: Path, num_files: int | None
) -> list[zipfile.ZipInfo]:
    """Return the archive's entries if their number, names, kinds and sizes are safe."""
    infos = opened.infolist()
    if len(infos) > MAX_ENTRIES:
        raise IntegrityError(f"{archive}: {len(infos):,} entries are too many")
    for info in infos:
        name = info.orig_filename  # zipfile's own is cut at a NUL
        parts = name.rstrip("/").split("/")
        if (
            name != info.filename  # Python 3.12 and later: another one in an extra field
            or not is_plain_name(name)
            or any(part in ("", ".", "..") for part in parts)
            or parts[0] == RECORDS_DIR
        ):
            raise IntegrityError(f"{archive}: {name!r} is not a plain path")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise IntegrityError(f"{archive}: {name!r} is a link or a device")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise IntegrityError(f"{archive}: {name!r} is packed by method {info.compress_type}")
        if info.is_dir() and info.file_size:
            raise IntegrityError(f"{archive}: the folder {name!r} has content")
    count = sum(not info.is_dir() for info in infos)
    if not count or num_files not in (None, count):
        expected = "some" if num_files is None else f"{num_files:,}"
        raise IntegrityError(f"{archive} contains {count:,} files, {expected} were expected")
    size, total = archive.stat().st_size, sum(info.file_size for info in infos)
    if sum(info.compress_size for info in infos) > size:
        raise IntegrityError(f"{archive}: its entries overlap or go beyond its end")
    if total > size * MAX_RATIO:
        raise IntegrityError(f"{archive}: {total:,} bytes from an archive of {size:,}: a zip bomb")
    return infos


def _extract(
    opened: zipfile.ZipFile,
    infos: list[zipfile.ZipInfo],
    folder: Path,
    label: str,
    progress: Progress,
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
            while data := stream.read(CHUNK_BYTES):
                done += file.write(data)
                progress(label, done, total)
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
