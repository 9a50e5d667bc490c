"""A full disk for each file that a command writes: the k-th one is /dev/full, which refuses each byte."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import Cli, Result

from ssdctl import files

WRITES = os.O_EXCL | os.O_APPEND | os.O_TRUNC  # else it is a lock file, which stays empty


class FullDisk:
    """Replaces one of the files that are opened for writing; counts them."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.paths: list[Path] = []
        self.open = files.no_follow

    def no_follow(self, path: str | Path, flags: int) -> int:
        descriptor = self.open(path, flags)
        if flags & WRITES:
            self.paths.append(Path(path))
            if len(self.paths) == self.at:
                full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(full, descriptor)
                os.close(full)
        return descriptor


@contextmanager
def full_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    disk = FullDisk(number)
    original = files.no_follow
    with monkeypatch.context() as patch:
        for module in list(sys.modules.values()):
            if vars(module).get("no_follow") is original:
                patch.setattr(module, "no_follow", disk.no_follow)
        yield disk


def check_each_write(
    run: Callable[[], Result], output: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Fail each write in turn; return the paths of an undisturbed run."""
    at = 0
    while True:
        at += 1
        shutil.rmtree(output, ignore_errors=True)
        with full_at(at, monkeypatch) as disk:
            result = run()
        if len(disk.paths) < at:
            assert result.code == 0, result.err
            return disk.paths
        where = (at, disk.paths[at - 1].name, result.err)
        assert result.code == 6, where
        assert "no space left" in result.err, where
        assert "Traceback" not in result.err, where
        temporaries = [p for p in output.rglob("*") if p.name.endswith(files.TEMPORARY_SUFFIX)]
        assert not temporaries, where
        if at == 1 or output.exists():  # else it begins as the first one did
            again = run()
            assert again.code == 0, (where, again.err)


pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


@pytest.mark.parametrize("command", ["export CHECKPOINT --format safetensors", "report RUN"])
def test_a_command_that_writes_a_file(
    command: str, tiny_run: Path, checkpoint: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"RUN": tiny_run, "CHECKPOINT": checkpoint}
    words = [names.get(word, word) for word in command.split()]
    assert check_each_write(lambda: cli(*words, "--out", "out/a"), Path("out"), monkeypatch)


def test_prepare(shapes: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    prepare = ("prepare", "--data", shapes, "--store", out, "--jobs", 1)
    assert len(check_each_write(lambda: cli(*prepare), out, monkeypatch)) > 4
