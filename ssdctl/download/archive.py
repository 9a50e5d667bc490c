"""Extract an untrusted zip safely, atomically and with size limits.

Everything that the archive's directory states is checked before a byte is written. The content is
written to a temporary folder next to its destination (`.NAME.unpacking`), CRCs are checked while
reading, and only then are the top-level folders renamed to the destination.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ssdctl.download.transfer import Progress
from ssdctl.errors import IntegrityError
from ssdctl.files import atomic_write, disk_errors, safe_join

CHUNK_BYTES = 1024 * 1024
MAX_ENTRIES = 2_000_000
MAX_RATIO = 100  # content to archive; JSON takes 10, JPEG 1, a bomb 1000 and more
MAX_NAME_BYTES = 255  # of one component, on all supported file systems
MAX_PATH_BYTES = 1024
RECORDS_DIR = ".ssdctl"  # download's records in the dataset folder: no archive may write there


class Entry(NamedTuple):
    """One unpacked file: its path below the destination, its size in bytes, its CRC-32."""

    path: str
    size: int
    crc: int


def unpack(
    archive: Path,
    dest: Path,
    *,
    num_files: int | None = None,
    progress: Progress,
) -> list[Entry]:
    """Unpack `archive` into `dest`, replacing files of the same names.

    A top-level folder that `dest` does not have is published by one rename; into one that exists,
    the files are moved one by one (`annotations/` of several archives). The caller holds a lock.

    Args:
        archive: A zip, stored or deflated.
        dest: Created if it does not exist.
        num_files: How many files it must contain; None if unknown.
        progress: Gets the progress in bytes.

    Raises:
        IntegrityError: It is cut, broken, unsafe, too large for its size, or not as expected;
            nothing was published.
        DiskError: The content cannot be written.
    """
    temporary = temporary_dir(archive, dest)
    _remove(temporary)
    try:
        with _broken_zip(archive), zipfile.ZipFile(archive) as opened:
            infos = _checked_entries(opened, archive)
            entries = [Entry(i.filename, i.file_size, i.CRC) for i in infos if not i.is_dir()]
            if num_files is not None and len(entries) != num_files:
                raise IntegrityError(
                    f"{archive} contains {len(entries):,} files, {num_files:,} were expected"
                )
            with disk_errors(temporary, "creating"):
                temporary.mkdir(parents=True)
            _extract(opened, infos, temporary, f"unpacking {archive.name}", progress)
        _publish(temporary, dest)
    finally:
        _remove(temporary)
    return entries


def content_bytes(archive: Path) -> int:
    """Return the size of the content in bytes, by the archive's directory.

    Raises:
        IntegrityError: As `unpack`.
    """
    with _broken_zip(archive), zipfile.ZipFile(archive) as opened:
        return sum(info.file_size for info in _checked_entries(opened, archive))


def temporary_dir(archive: Path, dest: Path) -> Path:
    """Return the folder that holds the content until it is complete."""
    return dest / f".{archive.name}.unpacking"


@contextlib.contextmanager
def _broken_zip(archive: Path) -> Iterator[None]:
    """Convert the errors of zipfile and zlib on a broken archive to an `IntegrityError`."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        EOFError,
        ValueError,  # a seek before the start, an impossible date, a name that is not UTF-8
        NotImplementedError,
        RuntimeError,  # an encrypted entry
        OverflowError,
    ) as error:
        raise IntegrityError(
            f"{archive}: broken archive: {error or type(error).__name__}",
            hint="only zip archives are unpacked: delete it and fetch it again, or leave unpack "
            "out of its manifest",
        ) from error
    except OSError as error:
        if error.errno != errno.EINVAL or error.filename is not None:  # an invalid seek
            raise
        raise IntegrityError(f"{archive}: broken archive: {error}") from error


def _checked_entries(opened: zipfile.ZipFile, archive: Path) -> list[zipfile.ZipInfo]:
    """Return the archive's entries if all of them are safe."""
    infos = opened.infolist()
    archive_bytes = archive.stat().st_size
    if len(infos) > MAX_ENTRIES:
        raise IntegrityError(f"{archive}: {len(infos):,} entries are too many")
    files: set[str] = set()
    folders: set[str] = set()
    for info in infos:
        _check_entry(info, archive)
        path = info.filename.rstrip("/")
        # Every name that is a folder: the entry's parents, and the entry itself if it is one.
        parents = path.split("/")[:-1]
        folders.update("/".join(parents[: i + 1]) for i in range(len(parents)))
        if info.is_dir():
            folders.add(path)
        elif path in files:
            raise IntegrityError(f"{archive}: {path!r} occurs twice")
        else:
            files.add(path)
    if not files:
        raise IntegrityError(f"{archive} contains no files")
    if both := files & folders:
        raise IntegrityError(f"{archive}: {min(both)!r} is a file and a folder")
    packed = sum(info.compress_size for info in infos)
    total = sum(info.file_size for info in infos)
    if packed > archive_bytes:
        raise IntegrityError(f"{archive}: its entries overlap or go beyond its end")
    if total > archive_bytes * MAX_RATIO:
        raise IntegrityError(
            f"{archive}: {total:,} bytes from an archive of {archive_bytes:,}: a zip bomb"
        )
    return infos


def _check_entry(info: zipfile.ZipInfo, archive: Path) -> None:
    name = info.orig_filename  # zipfile's own is cut at a NUL
    if name != info.filename or name.startswith("/") or "\\" in name:
        raise IntegrityError(f"{archive}: {name!r} is not a plain path")
    parts = name.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts) or parts[0] == RECORDS_DIR:
        raise IntegrityError(f"{archive}: {name!r} is not a plain path")
    sizes = [len(part.encode(errors="surrogateescape")) for part in parts]
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) > MAX_PATH_BYTES:
        raise IntegrityError(f"{archive}: the name {name[:60]!r}... is too long")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise IntegrityError(f"{archive}: {name!r} is a link or a device")
    if info.flag_bits & 1:
        raise IntegrityError(f"{archive}: {name!r} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise IntegrityError(f"{archive}: {name!r} is packed by method {info.compress_type}")
    if info.is_dir() and info.file_size:
        raise IntegrityError(f"{archive}: the folder {name!r} has content")
    if info.compress_type == zipfile.ZIP_STORED and info.file_size != info.compress_size:
        raise IntegrityError(f"{archive}: {name!r} has another size than it declares")


def _extract(
    opened: zipfile.ZipFile,
    infos: list[zipfile.ZipInfo],
    folder: Path,
    label: str,
    progress: Progress,
) -> None:
    """Write the entries below `folder`; no entry gets more bytes than it declared."""
    total = sum(info.file_size for info in infos)
    done = 0
    created: set[Path] = set()
    for info in infos:
        target = safe_join(folder, info.filename)
        parent = target if info.is_dir() else target.parent
        with disk_errors(target, "unpacking"):
            if parent not in created:
                parent.mkdir(parents=True, exist_ok=True)
                created.add(parent)
            if info.is_dir():
                continue
            archive = Path(str(opened.filename))
            with _broken_zip(archive), opened.open(info) as stream, target.open("xb") as file:
                left = info.file_size
                while data := stream.read(CHUNK_BYTES):
                    left -= len(data)
                    if left < 0:
                        break
                    file.write(data)
                    done += len(data)
                    progress(label, done, total)
        if left:
            raise IntegrityError(
                f"{opened.filename}: {info.filename!r} has another size than it declares"
            )


def _publish(temporary: Path, dest: Path) -> None:
    """Move the content of `temporary` to `dest`, each new top-level folder by one rename."""
    with disk_errors(dest, "writing"):
        for item in sorted(temporary.iterdir()):
            target = dest / item.name
            if item.is_dir() and target.is_dir():
                _merge(item, target)
            else:
                item.replace(target)


def _merge(source: Path, target: Path) -> None:
    for folder, folders, files in os.walk(source):
        destination = target / Path(folder).relative_to(source)
        for name in folders:
            (destination / name).mkdir(exist_ok=True)
        for name in files:
            try:
                (Path(folder) / name).replace(destination / name)
            except OSError as error:
                if error.errno != errno.EXDEV:  # `target` may be a link to another disk
                    raise
                with (
                    (Path(folder) / name).open("rb") as old,
                    atomic_write(destination / name) as new,
                ):
                    shutil.copyfileobj(old, new, CHUNK_BYTES)


def _remove(folder: Path) -> None:
    with disk_errors(folder, "removing"), contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)
