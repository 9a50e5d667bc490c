"""What a run must survive: kills at any moment, a full disk, lost ranks."""

import errno
import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Cli
from helpers import (
    ForkedProcess,
    Train,
    assert_same_state,
    has_steps,
    last,
    records,
    start,
    train_command,
    wait_for,
)

from ssdctl import files
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.distributed import free_port
from ssdctl.errors import DiskError
from ssdctl.evaluation import analysis
from ssdctl.runs import metrics
from ssdctl.training.step import TrainStep


def test_an_evaluation_whose_process_is_killed_is_scored_in_the_training_process(
    tiny_run: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the system when memory runs out."""
    killed = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        killed.append(command)
        return subprocess.run(["sh", "-c", "kill -KILL $$"], **options)

    monkeypatch.setattr(analysis, "subprocess", SimpleNamespace(run=run))
    assert "SIGKILL" in train("--steps", 3)
    assert len(killed) == 1
    assert records(tmp_path / "run", "eval") == records(tiny_run, "eval")


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_a_store_that_is_cut_in_mid_run_ends_it_with_its_newest_state_saved(
    shapes: Path, tmp_path: Path, cli: Cli, encoding: str
) -> None:
    """Reading mapped memory beyond the end of a file would kill the process (SIGBUS).

    It does if pixels that are not encoded are cut while an image is read (docs/reliability.md).
    """
    store = tmp_path / "store"
    prepare = ["prepare", "--data", shapes, "--store", store, "--encoding", encoding, "--force"]
    for run in (tmp_path / "first", tmp_path / "second", tmp_path / "third"):
        assert cli(*prepare).code == 0
        command = train_command(shapes, run, "--store", store)
        process = start(*command, "--steps", 1000)
        wait_for(lambda run=run, process=process: has_steps(run, 1), process)
        files = [*store.glob("*.arrow")]
        assert len(files) >= 4
        for path in files:
            os.truncate(path, 5000 if path.name.startswith("images-train") else 0)
        _, words = process.communicate()
        if encoding == "jpeg" or process.returncode != -signal.SIGBUS:
            break
    assert process.returncode == 6, words
    assert "images-train" in words
    assert "Traceback" not in words
    stopped = last(run).step
    assert stopped >= records(run, "train")[-1]["step"] > 0
    assert cli(*prepare).code == 0
    assert cli(*command, "--steps", stopped + 1).code == 0


@pytest.mark.parametrize("lasts", [2, 99])
@pytest.mark.parametrize("where", ["checkpoint", "metrics"])
def test_a_refusal_of_the_file_system_is_tried_again_before_the_run_stops(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, where: str, lasts: int
) -> None:
    """As of a network file system whose server restarts."""
    run, options = tmp_path / "run", ["--steps", 3, "--save-every", "1st"]
    name = "step-00000002" if where == "checkpoint" else "metrics.jsonl"
    opened, left = files.no_follow, lasts

    def stale(path: str | Path, flags: int) -> int:
        nonlocal left
        if name in str(path) and left:
            left -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return opened(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(files, "RETRY_AFTER_S", (0, 0, 0))
        patch.setattr(files, "no_follow", stale)
        patch.setattr(metrics, "no_follow", stale)
        words = train(*options, code=0 if lasts == 2 else 6)
    if lasts > 2:
        assert os.strerror(errno.ESTALE) in words
        assert name in words
        train(*options)
    assert [r["step"] for r in records(run, "train")] == [1, 2, 3]
    assert last(run).step == 3


def test_a_failed_save_ends_the_run_at_the_next_step(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DiskError("no space left")

    monkeypatch.setattr(CheckpointFolder, "write", full)
    train("--save-every", "3st", "--steps", 9, code=6)
    steps = [r["step"] for r in records(tmp_path / "run", "train")]
    assert 3 <= steps[-1] < 6  # before the next save


def two_ranks(*command: object) -> list[ForkedProcess]:
    """Start two ranks of a training without a launcher."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    return [start(*command, RANK=str(r), LOCAL_RANK=str(r), **common) for r in (0, 1)]


@pytest.mark.parametrize("how", ["dies", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_lost_rank_is_named_and_the_others_end(shapes: Path, tmp_path: Path, how: str) -> None:
    """Without a launcher's help: the ranks notice by themselves."""
    run = tmp_path / "run"
    options = ["--steps", 10_000, "--rank-timeout", 6, "--bs", 1]
    ranks = two_ranks(*train_command(shapes, run, *options))
    try:
        wait_for(lambda: has_steps(run, 2), ranks[0])
        ranks[1].send_signal(signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        _, words = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert ranks[0].returncode == 8, words
    assert "rank 0 lost rank 1" in words
    assert "GLHF" not in words
    assert "Traceback" not in words


def test_a_clock_that_jumps_back_by_a_day_changes_nothing(
    tiny_run: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, clock, clock_ns, day_s = TrainStep.__call__, time.time, time.time_ns, 24 * 60 * 60

    def jumping(*given: Any) -> Any:
        monkeypatch.setattr(time, "time", lambda: clock() - day_s)
        monkeypatch.setattr(time, "time_ns", lambda: clock_ns() - day_s * 10**9)
        return step(*given)

    monkeypatch.setattr(TrainStep, "__call__", jumping)
    run = tmp_path / "run"
    train("--steps", 3, "--save-every", "0.00001min", "--keep", 9)
    assert_same_state(last(run), last(tiny_run))
    assert all(r["images_per_second"] > 0 for r in records(run, "train"))
    assert all(r.get("total_s", 0) >= 0 for r in records(run, "event"))
    assert len(CheckpointFolder(run, keep=9).steps()) > 1  # saved by the time since the last save


@pytest.mark.slow(in_ci=True)
def test_a_rank_that_is_suspended_for_some_seconds_continues(shapes: Path, tmp_path: Path) -> None:
    """As by SIGSTOP, or with its virtual machine; the others wait for it."""
    for run, suspended in ((tmp_path / "whole", ()), (tmp_path / "run", (0, 1))):
        ranks = two_ranks(*train_command(shapes, run, "--bs", 1, "--steps", 12))
        try:
            for rank in suspended:
                wait_for(partial(has_steps, run, 3 * rank + 2), ranks[0])
                ranks[rank].send_signal(signal.SIGSTOP)
                time.sleep(3)
                ranks[rank].send_signal(signal.SIGCONT)
            words = [process.communicate(timeout=120)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
        assert [process.returncode for process in ranks] == [0, 0], words
    assert_same_state(last(tmp_path / "run"), last(tmp_path / "whole"))


@pytest.mark.skipif(
    shutil.which("bindfs") is None or not os.access("/dev/fuse", os.W_OK),
    reason="needs bindfs and /dev/fuse",
)
def test_a_run_folder_whose_file_system_disconnects(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    """The folder is mounted a second time through a process, which is killed."""
    folder, mount = tmp_path / "source", tmp_path / "mount"
    folder.mkdir()
    mount.mkdir()
    server = subprocess.Popen(["bindfs", "-f", "--no-allow-other", folder, mount])
    try:
        while not mount.is_mount():
            if server.poll() is not None:
                pytest.skip("this container may not mount")
            time.sleep(0.01)
        options = ["--save-every", "2st", "--steps"]
        process = start(*train_command(shapes, mount / "run", *options, 10_000))
        wait_for((folder / "run/checkpoints/last.pt").exists, process)
        server.kill()
        _, words = process.communicate(timeout=60)
    finally:
        server.kill()
        server.wait()
        subprocess.run(["fusermount", "-u", "-z", mount], capture_output=True)
    assert process.returncode == 6, words
    assert os.strerror(errno.ENOTCONN) in words
    assert any(f"{mount}/run/{name}" in words for name in ("metrics.jsonl", "checkpoints")), words
    assert "Traceback" not in words
    run = folder / "run"
    cli(*train_command(shapes, run, *options, last(run).step + 1)).expect(0)
