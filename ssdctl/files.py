"""Atomic file writes (temporary file, fsync, rename, fsync of the folder), locks, safe paths.

A reader sees the old file or the new one, never a part. A killed writer leaves a temporary file
(`.NAME.RANDOM.PID.tmp`), which `remove_stale_temporaries` deletes at the next start.

Other users may write to the folder, too: every file is opened through `no_follow`, and temporary
files have unpredictable names and are created exclusively.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import socket
import stat
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import msgspec

from ssdctl.errors import DataError, DiskError, IntegrityError, SsdctlError, UsageError
from ssdctl.runtime.safe_text import redact_url
from ssdctl.runtime.system import is_process_running

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)
_DESCRIBING = threading.Lock()
TEMPORARY_SUFFIX = ".tmp"
MAX_IN_TEMPORARY = 220  # bytes of its name; file systems take 255
TEMPORARY_NAME = re.compile(
    r"\.(.+)\.[0-9a-f]{12}\.([0-9]{1,10})(?:-([0-9a-f]{4}))?\.tmp", re.DOTALL
)
ABANDONED_S = 3600.0  # since the last write of another machine
# Errors of damaged or deeply nested JSON; ValidationError is a DecodeError.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
LOCK_POLL_S = 0.1
# Errors of an unsuitable path or file.
UNSUITABLE_PATH = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
    errno.EFBIG, errno.ENXIO,
)  # fmt: skip
# Errors of a network file system or a busy disk, after which the same operation may succeed.
TRANSIENT = (
    errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EBUSY, errno.EAGAIN, errno.EINTR,
)  # fmt: skip
RETRY_AFTER_S = (1.0, 5.0, 20.0)
T = TypeVar("T")


@contextlib.contextmanager
def disk_errors(path: Path, doing: str) -> Iterator[None]:
    """Convert errors of the file system to a `DiskError` (exit 6) that names the path."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if str(where).endswith(TEMPORARY_SUFFIX):
            where = path  # the user never named the temporary file
        if error.errno is None or isinstance(error, BrokenPipeError):
            raise  # not of the file system; the reader of an output has ended
        raise disk_error(error, where, doing) from error


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder in TMPDIR that is removed at the end.

    Raises:
        DiskError: The file system refuses; it names the folder if the error names no file.
    """
    import tempfile  # late: every command imports this file

    with tempfile.TemporaryDirectory(prefix=prefix) as name, disk_errors(Path(name), "writing"):
        yield Path(name)


def disk_error(error: OSError, where: object, doing: str) -> DiskError:
    """Return the error of a file system's refusal, with the path, the operation and its text."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(
            f"no space left while {doing} {where}", hint="free some space, then run it again"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "choose a folder you may access, or change its owner"
        if error.errno == errno.EROFS:
            hint = "choose a folder on a file system that can be written"
        return DiskError(f"no permission while {doing} {where}: {error.strerror}", hint=hint)
    hint = "check that the disk or the network file system works, then run it again"
    if error.errno in UNSUITABLE_PATH:
        hint = "choose another name or folder"
    if error.errno == errno.EFBIG:
        hint = "raise the limit of a file's size (ulimit -f), then run it again"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        hint = "raise the limit of open files (ulimit -n), then run it again"
    return DiskError(f"{error.strerror} while {doing} {where}", hint=hint)


def refusal_of_disk(error: object) -> DiskError | None:
    """Return the error for an exception that is the file system's; None if it is another's."""
    if not isinstance(error, OSError) or not error.errno or isinstance(error, ConnectionError):
        return None
    return disk_error(error, error.filename or "a file", "reading or writing")


def own_refusal_of_disk(error: BaseException | None) -> DiskError | None:
    """Return the same for an exception that only ssdctl met, no observer or plugin."""
    if error is None or (refusal := refusal_of_disk(error)) is None:
        return None
    if getattr(error, "is_users", False):
        return None
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    return refusal if modules <= {"ssdctl", *sys.stdlib_module_names} else None


def unreadable(
    path: str | Path, error: Exception, wrong_file: type[SsdctlError] = DataError
) -> SsdctlError:
    """Return the error for an unreadable file: `wrong_file` if its path or its content is wrong,
    DiskError (exit 6) if the file system refuses."""
    if isinstance(error, OSError) and error.errno not in (None, *UNSUITABLE_PATH):
        return disk_error(error, path, "reading")
    return wrong_file(f"{path}: cannot be read: {reason_of(error)}")


def retry_transient(work: Callable[[], T]) -> T:
    """Call `work`, again after some seconds if the file system refuses only for now."""
    for wait_s in RETRY_AFTER_S:
        try:
            return work()
        except (DiskError, OSError) as error:
            cause = error.__cause__ if isinstance(error, DiskError) else error
            if not isinstance(cause, OSError) or cause.errno not in TRANSIENT:
                raise
            log.warning("%s; trying again in %.0f s", error, wait_s)
        time.sleep(wait_s)
    return work()


def no_follow(path: str | Path, flags: int) -> int:
    """Open a regular file for writing, never through a symbolic link; an `opener` for `open`.

    UsageError: the path is a symbolic link, a pipe, a socket or a device.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
    kind = "is not a regular file"
    try:
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            kind = "is a symbolic link, and ssdctl does not write through links"
        elif error.errno != errno.ENXIO:  # a pipe without a reader, a socket
            raise
    raise UsageError(f"{path}: {kind}", hint="delete it, or choose another folder")


def _temporary(path: Path) -> Path:
    name = shortened(path.name)
    writer = f"{os.getpid()}-{_machine()}"
    return path.with_name(f".{name}.{os.urandom(6).hex()}.{writer}{TEMPORARY_SUFFIX}")


def _machine() -> str:
    """Return digits for this machine, or container: elsewhere a process id means nothing."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError):
        names.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115 - the text
    return f"{zlib.crc32(' '.join(names).encode()) & 0xFFFF:04x}"


def shortened(name: str) -> str:
    """Shorten a name so that the longest one of a file system has a temporary name, too."""
    return name.encode("utf-8", "surrogateescape")[:MAX_IN_TEMPORARY].decode("utf-8", "ignore")


def refuse_url(path: str | Path, option: str) -> None:
    """Raise UsageError for a URL, also one that became a `Path`, such as `s3:/bucket/data`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) and not Path(path).exists():
        url = redact_url(re.sub(r":/+", "://", str(path), count=1))
        raise UsageError(
            f"{option} {url}: is a URL, not a local folder",
            hint="mount it (mount-s3, rclone mount) or copy it (aws s3 sync, rclone copy), "
            "and give that folder",
        )


def refuse_replacing(source: Path, target: Path, option: str) -> None:
    """Raise UsageError if `target` is the file that a result is computed from, by any name."""
    with contextlib.suppress(OSError, ValueError):  # one of them does not exist
        if source.samefile(target):
            raise UsageError(
                f"{option}: the result for {source} would replace the file itself",
                hint="choose another folder",
            )


def require_own_file(path: Path, option: str, beginning: str) -> None:
    """Refuse to replace a folder, or a file that is not an earlier result of the option.

    Args:
        beginning: Regular expression of the first characters of a result. It sees the first and
            the last megabyte of a larger file.
    """
    if has_content(path, option):
        with read_errors(path), open_regular(path) as file:
            content = file.read(1 << 20)
            file.seek(max(len(content), path.stat().st_size - (1 << 20)))
            content += file.read(1 << 20)
        if not re.match(beginning.encode(), content, re.IGNORECASE):
            refuse_other_file(path, option)


def has_content(path: Path, option: str) -> bool:
    """Return whether a file exists and is not empty; refuse a folder."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder", hint="choose another name or folder")
    return path.is_file() and path.stat().st_size > 0


def refuse_other_file(path: Path, option: str) -> NoReturn:
    raise UsageError(
        f"{option} {path}: exists, and is not an earlier result of {option}",
        hint="name another file",
    )


def make_dir(path: Path) -> Path:
    """Create a folder and its parents; return it."""
    with disk_errors(path, "creating"):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            if path.exists():
                raise
            path.mkdir(parents=True, exist_ok=True)  # removed by another process in between
    return path


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that is published at `path` if the block ends without an error."""
    temporary = _temporary(path)
    with disk_errors(path, "writing"):
        if path.is_symlink() and str(path.readlink()).startswith("/proc/"):  # /dev/stdout
            raise OSError(errno.ENXIO, "not a regular file")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise OSError(errno.ENXIO, "not a regular file")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb", opener=no_follow) as file:
                yield file
                file.flush()
                _keep_mode(path, file.fileno())
                sync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_dir(path.parent)


def _keep_mode(path: Path, file: int) -> None:
    """Give a new file the permissions of the one that it replaces."""
    with contextlib.suppress(OSError):  # there is none
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            os.fchmod(file, mode & 0o777)


def write_bytes(path: Path, content: bytes) -> None:
    with atomic_write(path) as file:
        file.write(content)


def write_text(path: Path, content: str) -> None:
    """Write `content` to `path` atomically, as UTF-8."""
    write_bytes(path, content.encode())


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading; OSError at once for a folder, pipe, socket or device."""
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.ENXIO, "not a regular file", str(path))


def msgspec_type(kind: type[T]) -> type[T]:
    """Return a type that msgspec may decode in several threads.

    Two threads that decode a Struct for the first time crash the process (msgspec 0.22): each sees
    the half-built description of the other.
    """
    with _DESCRIBING:
        msgspec.json.Decoder(kind)
    return kind


def read_limited(path: Path, max_bytes: int, *, may_be_pipe: bool = False) -> bytes:
    """Return the content of a regular file; OSError if it has more than `max_bytes`."""
    with path.open("rb") if may_be_pipe else open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(content)) > max_bytes:
        limit = f"{max_bytes >> 20} MB" if max_bytes >= 1 << 20 else f"{max_bytes} bytes"
        raise OSError(errno.EFBIG, f"over {limit}, the limit of such a file", str(path))
    return content


def read_text(path: Path, max_bytes: int, *, may_be_pipe: bool = False) -> str:
    """Return the content of a UTF-8 file, which may begin with a byte order mark."""
    content = read_limited(path, max_bytes, may_be_pipe=may_be_pipe)
    refuse_utf16(content)
    return "\n".join(content.decode("utf-8-sig").replace("\r\n", "\n").split("\r"))


def read_toml(path: Path, max_bytes: int, what: str) -> tuple[str, dict[str, Any]]:
    """Return the text and the tables of a TOML file; UsageError if it is absent or not valid."""
    try:
        text = read_text(path, max_bytes, may_be_pipe=True)
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error, UsageError) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text; ValueError or RecursionError if it is not valid."""
    return tomllib.loads(text)


def reason_of(error: Exception) -> str:
    """Return why a file could not be read, without its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextlib.contextmanager
def read_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of reading a user's data file, see `unreadable`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from None


def refuse_utf16(content: bytes) -> None:
    """Raise a UnicodeDecodeError with the encoding's name if a text is UTF-16."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        reason = "the file is UTF-16: save it as UTF-8"
        raise UnicodeDecodeError("utf-8", content[:2], 0, 2, reason)


def sync(descriptor: int) -> None:
    """Flush a file or folder to disk, if its file system can."""
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network and FUSE file systems do not support it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_dir(path: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Flush a file, which need not exist, to disk."""
    with disk_errors(path, "writing"), contextlib.suppress(FileNotFoundError):
        sync_dir(path)


def link_or_copy(source: Path, target: Path) -> None:
    """Publish `source` under a second name: a hard link if possible, else a copy with its time."""
    temporary = _temporary(target)
    with disk_errors(target, "writing"):
        try:
            os.link(source, temporary)
        except OSError:
            with source.open("rb") as file, atomic_write(target) as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                times = os.fstat(file.fileno())
                os.utime(copy.fileno(), ns=(times.st_atime_ns, times.st_mtime_ns))
            return
        temporary.replace(target)
        temporary.unlink(missing_ok=True)  # a rename onto the same file does nothing
        sync_dir(target.parent)


def remove_stale_temporaries(folder: Path, *names: str) -> list[Path]:
    """Delete the temporary files of dead writers of `names` (none: all); return their paths.

    Those of another machine are deleted an hour after the last write. Call it before this process
    writes to the folder, which need not exist: a dead writer may have had its id.
    """
    removed, names = [], tuple(map(shortened, names))
    for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        match = TEMPORARY_NAME.fullmatch(path.name)
        if match is None or (names and match[1] not in names):
            continue
        writer, is_here = int(match[2]), match[3] in (None, _machine())
        with contextlib.suppress(OSError):  # the command works with it there, too
            if is_here:
                is_dead = writer == os.getpid() or not is_process_running(writer)
            else:
                is_dead = time.time() - path.stat().st_mtime > ABANDONED_S
            if is_dead:
                path.unlink()
                removed.append(path)
    return removed


class DistinctKeys:
    """A loader of yaml that refuses a key which occurs twice in a table."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        import yaml

        seen: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                problem = f"{name} occurs again, after line {seen[name]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[name] = key.start_mark.line + 1
        loaded: dict[Any, Any] = super().construct_mapping(node, deep)  # type: ignore[misc]
        return loaded


def is_plain_name(name: str) -> bool:
    """Return whether an untrusted name is a relative path that does not leave its folder."""
    if not name or "\0" in name or "\\" in name or name.startswith("/"):
        return False
    return ".." not in name or ".." not in name.split("/")


def is_utf8(name: str) -> bool:
    """Return whether the name of a file is text, not bytes of another encoding."""
    return name.isascii() or name == name.encode("utf-8", "replace").decode()


def free_name(name: str, taken: dict[str, int]) -> str:
    """Return a name that is not taken, `name` or `name-2` and so on, and take it.

    Args:
        taken: The last number of each name, 1 if it occurred once.
    """
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name}-{taken[name]}"
    taken[free] = 1
    return free


def numbered(path: Path) -> Iterator[Path]:
    """Yield `path`, then the paths with 1, 2 and so on at the end of its name."""
    return (path.with_name(f"{path.name}{n or ''}") for n in itertools.count())


def set_aside(path: Path) -> Path:
    """Rename a file to NAME.replaced, numbered if that exists; return the new path."""
    names = numbered(path.with_name(f"{path.name}.replaced"))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def safe_join(root: Path, name: str) -> Path:
    """Return `root / name` for an untrusted relative name, else raise IntegrityError.

    Only the name is checked, so symbolic links that the user made inside `root` still work.
    """
    if not is_plain_name(name):
        raise IntegrityError(f"{name!r} is not a plain path below {root}")
    return root / name


def try_lock(path: Path) -> int | None:
    """Lock a file, created if missing, and return its descriptor; None if another process has it.

    The kernel releases the lock when the descriptor is closed or the process ends. If the file
    system has no locks, the file counts as locked by this process.
    """
    with disk_errors(path, "locking"):
        descriptor = no_follow(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # An owner may remove the file when it ends: then this lock is on a deleted file.
        if path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return descriptor
    os.close(descriptor)
    return None


@contextlib.contextmanager
def lock(path: Path, message: str = "", *, is_temporary: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on `path`, created if missing; wait for its owner.

    `message` is logged if another process has it. A temporary file is deleted at the end, unless it
    has content: then it is a file of the user.
    """
    make_dir(path.parent)
    if (descriptor := try_lock(path)) is None and message:
        log.info(message)
    while descriptor is None:
        time.sleep(LOCK_POLL_S)
        make_dir(path.parent)  # its owner may have deleted it
        descriptor = try_lock(path)
    try:
        yield
    finally:
        if is_temporary and not os.fstat(descriptor).st_size:
            with contextlib.suppress(OSError):  # the file system may be gone
                path.unlink()
        os.close(descriptor)


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free
