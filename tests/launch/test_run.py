"""The exit code of a job, and the ranks that failed first, from what the ranks recorded."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from ssdctl.distributed.rank_process import read_exits, start_rank_log
from ssdctl.errors import DiskError, UsageError
from ssdctl.launch import processes
from ssdctl.launch.base import Job
from ssdctl.launch.processes import first_failure, job_exit_code


@pytest.mark.parametrize(
    ("launcher_code", "exits", "stop_signal", "expected"),
    [
        (0, [0, 0], None, 0),
        (1, [75, 75], None, 75),  # torchrun exits with 1 whatever its ranks returned
        (1, [75], None, 8),  # the other rank died without a word
        (1, [75], 15, 75),  # ... of the signal, before it had begun
        (-15, [], 15, 75),
        (-9, [75, 75], None, 75),  # the launcher was killed, but everything is saved
        (1, [75, 6], 15, 6),
        (1, [8, 7], None, 7),  # 8 only reports the loss of the other
        (1, [8, 75], None, 8),
        (137, [], None, 8),  # mpirun's code for a killed rank
        (75, [], None, 75),  # mpirun hands a rank's code on
        (0, [75, 75], None, 75),  # to their launcher, ranks that saved and stopped ended well
        (0, [0, 0], 15, 0),
        (143, [], 10, 75),  # mpirun, signaled before it had ranks
    ],
)
def test_exit_code_of_a_job(
    launcher_code: int, exits: list[int], stop_signal: int | None, expected: int
) -> None:
    assert job_exit_code(launcher_code, exits, 2, stop_signal) == expected


@pytest.mark.parametrize(
    ("arguments", "ranks", "words"),
    [
        ((3, {1: 8, 0: 3}, 2, None), [0], "exit code 3"),
        ((3, {1: 8, 0: 3}, 2, 1), [0], "exit code 3"),
        ((8, {0: 8, 2: 8}, 3, None), [1], "died or hung"),
        ((8, {}, 3, 2), [2], "died or hung"),
        ((8, {0: 8}, 2, None, True), [1], "memory"),
        ((8, {0: 8}, None, None), [0], "the first to report"),
        ((8, {}, 2, None), None, ""),
        ((8, {0: 0, 1: 0}, 2, None), None, ""),
        ((75, {0: 75}, 2, None), None, ""),
    ],
)
def test_the_rank_that_failed(arguments: Any, ranks: list[int] | None, words: str) -> None:
    failure = first_failure(*arguments)
    assert (failure and failure[0]) == ranks
    assert failure is None or words in failure[1]


def test_a_launcher_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Job(("/nowhere/mpirun",), {}, "mpirun", 2)
    with pytest.raises(UsageError, match="/nowhere/mpirun"):
        processes.run(plan)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(DiskError, match="absent") as caught:
        processes.run(plan)
    assert "TMPDIR" in str(caught.value.hint)


def test_ranks_are_ordered_by_the_time_of_their_end(tmp_path: Path) -> None:
    """Not by that of their files, which may be the same."""
    for rank, content in ((0, "8 200"), (1, "3 100"), (2, "0 300")):
        (tmp_path / str(rank)).write_text(content)
    assert list(read_exits(tmp_path).items()) == [(1, 3), (0, 8), (2, 0)]


def test_a_log_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    start_rank_log(tmp_path / "logs" / "rank-1.log", 1)
