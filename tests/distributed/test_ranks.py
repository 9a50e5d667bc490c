"""Who a process is among all (torchrun's, Open MPI's and Slurm's variables), and its addresses."""

import socket
from pathlib import Path

import pytest
from conftest import run_cli

from ssdctl.distributed import Ranks, find_own, find_ranks
from ssdctl.errors import UsageError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "2"), ("SIZE", "4"), ("LOCAL_RANK", "0"))
}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}  # an sbatch script's shell
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 4, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4, 0)),
        (OPEN_MPI, (2, 4, 0)),
        ({**BATCH, **OPEN_MPI}, (2, 4, 0)),
        (BATCH, (0, 1, 0)),
        ({**BATCH, **STEP}, (0, 4, 0)),
        ({**BATCH, "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, (3, 4, 1)),
        # A step of fewer tasks than the job has, as salloc's own shell is.
        ({**BATCH, **STEP, "SLURM_STEP_NUM_TASKS": "1"}, (0, 1, 0)),
    ],
)
def test_ranks(environment: dict[str, str], expected: tuple[int, int, int]) -> None:
    assert find_ranks(environment) == Ranks(*expected)


@pytest.mark.parametrize("rank", ["4", "-1", "x", ""])
def test_nonsense_is_refused(rank: str) -> None:
    with pytest.raises(UsageError, match="RANK="):
        find_ranks({**TORCHRUN, "RANK": rank})


def test_a_rank_that_cannot_meet_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**BATCH, "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    train = ("train", "--fake-data", "--device", "cpu", "--out", "run")
    run_cli(*train).expect(2, "MASTER_PORT is not set")
    assert not Path("run").exists()  # nor a log with the message


def test_this_machine_in_a_list_of_hosts() -> None:
    """By its name, else by an address of any other name, as Open MPI finds it."""
    others = ["192.0.2.7", "fd00::1", "", "a" * 64]
    assert find_own([*others, "127.0.0.9", "localhost"]) == 4
    assert find_own(["localhost", socket.gethostname()]) == 1
    assert find_own(others) is None
