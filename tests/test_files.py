"""Files are written atomically and read as what they are; names cannot leave their folder."""

import contextlib
import errno
import functools
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observed import plan_of, start_of

from ssdctl import files
from ssdctl.config.resolve import read_toml
from ssdctl.data.formats import coco
from ssdctl.data.prepare import _make_store_dir as make_store_dir
from ssdctl.distributed.rank_process import start_rank_log
from ssdctl.download.transfer import PartialFile, partial_path
from ssdctl.errors import DataError, DiskError, IntegrityError, SsdctlError, UsageError
from ssdctl.files import (
    atomic_write,
    disk_errors,
    free_bytes,
    link_or_copy,
    lock,
    read_text,
    remove_stale_temporaries,
    safe_join,
    temporary_folder,
    write_text,
)
from ssdctl.runs.folder import exclusive_run
from ssdctl.runs.metrics import MetricsFile
from ssdctl.training.observers.mllog import MLLog


@pytest.mark.parametrize("name", ["file", "é" * 127])
def test_a_killed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_text(path, "old")
    code = (
        "import os, signal, sys; from pathlib import Path; from ssdctl.files import atomic_write\n"
        f"with atomic_write(Path({str(path)!r})) as f:\n"
        "    f.write(b'new' * 10000); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    assert path.read_text() == "old"
    assert not remove_stale_temporaries(tmp_path, "other")
    assert len(remove_stale_temporaries(tmp_path, name)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_of_a_running_writer_is_kept(tmp_path: Path) -> None:
    living = tmp_path / f".file.{0:012x}.{os.getppid()}.tmp"
    own = tmp_path / f".file.{0:012x}.{os.getpid()}.tmp"  # a dead process had this one's number
    elsewhere = tmp_path / f".file.{0:012x}.1-0000.tmp"  # of another machine
    _ = [path.touch() for path in (living, own, elsewhere)]
    assert remove_stale_temporaries(tmp_path) == [own]
    os.utime(elsewhere, (0, 0))
    assert (remove_stale_temporaries(tmp_path), living.exists()) == ([elsewhere], True)


def refuse(number: int, *_: object, **__: object) -> None:
    raise OSError(number, os.strerror(number))


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        calls.append(f"fsync {'folder' if path.is_dir() else path.stat().st_size}")
        fsync(descriptor)

    def note_replace(self: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    return calls


def test_power_failures_leave_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is flushed before the rename, and the rename before the function returns."""
    calls = noted(monkeypatch)
    write_text(tmp_path / "file", "12345")
    assert calls == ["fsync 5", "rename", "fsync folder"]
    calls.clear()
    link_or_copy(tmp_path / "file", tmp_path / "linked")
    assert calls == ["rename", "fsync folder"]
    calls.clear()
    monkeypatch.setattr(os, "link", functools.partial(refuse, errno.EPERM))
    link_or_copy(tmp_path / "file", tmp_path / "copied")
    assert calls == ["fsync 5", "rename", "fsync folder"]
    calls.clear()
    part = PartialFile(tmp_path / "download", 9, 1)
    part.publish(tmp_path / "download")
    assert calls == ["fsync 9", "rename", "fsync folder"]


@pytest.mark.parametrize("name", ["ESTALE", "EIO", "EROFS", "EFBIG", "ENOSPC", "EINVAL"])
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_every_refusal_of_the_system_is_a_disk_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, operation: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    number = getattr(errno, name)
    refusal = functools.partial(refuse, number)
    with monkeypatch.context() as patch:
        if operation == "open":
            patch.setattr(files, "no_follow", refusal)
        elif operation != "write":
            patch.setattr(Path if operation == "replace" else os, operation, refusal)
        is_ignored = operation == "fsync" and name == "EINVAL"
        expected = contextlib.nullcontext() if is_ignored else pytest.raises(DiskError)
        with expected as caught, atomic_write(path) as file:
            file.write(b"new")
            if operation == "write":
                refuse(number)
    if caught is not None:
        assert str(path) in str(caught.value)
        words = "no space" if name == "ENOSPC" else os.strerror(number)
        assert words in str(caught.value)
        assert name != "EROFS" or "owner" not in str(caught.value.hint)
        assert name != "EFBIG" or "ulimit -f" in str(caught.value.hint)
    assert path.read_text() == ("new" if is_ignored else "old")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "calls"), [("ESTALE", 4), ("EIO", 4), ("ENOTCONN", 1), ("ENOSPC", 1)]
)
def test_a_transient_refusal_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: int
) -> None:
    assert files.RETRY_AFTER_S == (1, 5, 20)
    monkeypatch.setattr(files, "RETRY_AFTER_S", (0, 0, 0))
    times = 0

    def work(good_call: int) -> int:
        nonlocal times
        times += 1
        with disk_errors(tmp_path, "writing"):
            if times != good_call:
                refuse(getattr(errno, name))
        return times

    with pytest.raises(DiskError):
        files.retry_transient(lambda: work(0))
    assert times == calls
    if calls > 1:
        times = 0
        assert files.retry_transient(lambda: work(3)) == 3


def test_pipes_devices_and_folders_are_no_data_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "absent"):
        with pytest.raises(DataError, match=re.escape(str(path))), files.read_errors(path):
            files.read_limited(path, 1 << 20)
    with pytest.raises(UsageError, match="pipe"):  # without waiting for a reader
        hold(tmp_path / "pipe")


def test_pipes_and_standard_output_are_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to("/proc/self/fd/1")
    for path in (pipe, link):
        with pytest.raises(DiskError, match="not a regular file"):
            write_text(path, "new")
    assert pipe.is_fifo()
    assert link.is_symlink()


def test_permissions_of_a_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for mode in (0o600, 0o664):
        path.touch()
        path.chmod(mode)
        write_text(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_reader_that_has_ended_is_no_disk_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), disk_errors(tmp_path, "writing"):
        refuse(errno.EPIPE)


@given(st.text("ab./\\\0"))
def test_joined_names_stay_below_the_root(name: str) -> None:
    with contextlib.suppress(IntegrityError):
        joined = safe_join(Path("/some/root"), name)
        assert os.path.normpath(joined).startswith("/some/root")
        assert "\0" not in str(joined)


def hold(path: Path) -> None:
    with lock(path, "waiting"):
        pass


def test_a_full_folder_for_temporary_files_is_named() -> None:
    with pytest.raises(DiskError, match="no space") as error, temporary_folder("x-") as folder:
        raise OSError(errno.ENOSPC, "full")  # of `write`: it names no file
    assert str(folder) in str(error.value)
    assert not folder.exists()


def test_an_error_names_the_target_file(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "below"):  # a folder; through a file
        with pytest.raises(DiskError, match=f"while writing {tmp_path}") as caught:
            write_text(path, "y")
        assert caught.value.hint


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that another user tries to get overwritten."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def hold_run(path: Path) -> None:
    with exclusive_run(path.parent):
        pass


def log_for_mlperf(path: Path) -> None:
    MLLog().on_start(start_of(plan_of(9, mllog=str(path))))


WRITERS: dict[str, Callable[[Path], object]] = {
    "folder/lock": hold,
    partial_path(Path("folder/a")).as_posix(): lambda path: PartialFile(path.with_name("a"), 9, 1),
    "run/.lock": hold_run,
    "run/mllog": log_for_mlperf,
    "run/logs/rank-1.log": lambda path: start_rank_log(path, 1),
    "store/.lock": lambda path: make_store_dir(path.parent),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_target_of_a_planted_link_stays(name: str, victim: Path, tmp_path: Path) -> None:
    link = tmp_path / name
    link.parent.mkdir(parents=True)
    for target in (victim, tmp_path / "new"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(UsageError, match=re.escape(str(link))) as caught:
            WRITERS[name](link)
        assert caught.value.hint
        assert link.is_symlink()
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_a_link_as_metrics_is_replaced_or_refused(victim: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    file = MetricsFile(metrics, 0)
    metrics.symlink_to(victim)
    with pytest.raises(UsageError, match="symbolic link"):
        file.write({"kind": "event", "step": 1, "epoch": 0, "event": "x"})
    MetricsFile(metrics, 0).write({"kind": "event", "step": 1, "epoch": 0, "event": "x"})
    assert not metrics.is_symlink()
    assert victim.read_text() == "precious"


DEEP = 100_000
NESTED = f"a = {'[' * DEEP}{']' * DEEP}"
UTF16 = ("utf-16-le", "utf-16-be")
TOML = "[train]\nlr = 0.5\n"
JSON = '{"images": [], "annotations": [], "categories": []}'


def test_a_byte_order_mark_is_skipped_and_a_config_may_be_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("\ufeff" + TOML, encoding="utf-8")
    assert [o.value for o in read_toml(path)] == [0.5]
    read, write = os.pipe()  # as of `--config <(...)`
    os.write(write, TOML.encode())
    os.close(write)
    assert [o.value for o in read_toml(Path(f"/dev/fd/{read}"))] == [0.5]
    os.close(read)
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n")
    assert read_text(path, 100) == "a\nb\nc\n"
    path.write_text("\ufeff" + JSON, encoding="utf-8")
    assert not coco.read(path)["train"].file_names


@pytest.mark.parametrize(
    ("reader", "content", "kind"),
    [
        *((read_toml, f"\ufeff{TOML}".encode(code), UsageError) for code in UTF16),
        *((coco.read, f"\ufeff{JSON}".encode(code), DataError) for code in UTF16),
        (read_toml, NESTED.encode(), UsageError),
        (coco.read, b"[" * DEEP, DataError),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_utf16_and_deep_nesting_are_one_error(
    reader: Callable[[Path], object], content: bytes, kind: type[SsdctlError], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(kind) as caught:
        reader(path)
    assert str(path) in str(caught.value)
    if b"\0" in content:
        assert "UTF-16" in str(caught.value)
        assert "UTF-8" in str(caught.value)


def test_types_are_decoded_in_several_threads() -> None:
    """Without `msgspec_type`, the first use by two threads at once crashes the process."""
    code = (
        "import msgspec, sys, threading\n"
        "from ssdctl.files import msgspec_type\n"
        "sys.setswitchinterval(1e-6)\n"
        "for _ in range(100):\n"
        "    inner = msgspec.defstruct('B', [('x', 'list[int]')], module='builtins')\n"
        "    kind = msgspec.defstruct('A', [('a', inner), ('b', list[int])])\n"
        "    run = lambda: msgspec.convert(dict(a=dict(x=[]), b=[1]), msgspec_type(kind))\n"
        "    threads = [threading.Thread(target=run) for _ in range(3)]\n"
        "    any(t.start() for t in threads), any(t.join() for t in threads)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
